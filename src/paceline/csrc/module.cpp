// The native module: Python's arrays in, checked, and plain pointers out. The interpreter's lock is released while the
// kernels run.
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "encodings.h"
#include "levels.h"
#include "pack.h"

namespace paceline::bindings {
namespace {

int checked(int num_threads) {
  require(num_threads >= 1 && num_threads <= 1024, "num_threads must be 1 .. 1024");
  return num_threads;
}

Quantization parse_quantization(const std::string& name) {
  if (name.empty()) return Quantization::none;
  if (name == "int8") return Quantization::int8;
  if (name == "int4") return Quantization::int4;
  throw std::invalid_argument("quantization must be int8 or int4, not " + name);
}

PackedLinear pack_linear(Cpu& cpu, const std::vector<std::tuple<std::string, int64_t, Bytes>>& parts, int inputs,
                         const Floats& bias, const std::string& quantization) {
  std::vector<Part> packed;
  int64_t outputs = 0;
  require(inputs > 0, "a matrix must have inputs");
  for (const auto& [name, rows, data] : parts) {
    const Encoding encoding = parse_encoding(name);
    require(inputs % block_elements(encoding) == 0,
            std::to_string(inputs) + " inputs do not fill whole blocks of " + name);
    require_length("the matrix's data", data, rows * row_bytes(encoding, inputs));
    packed.push_back({encoding, rows, data.data()});
    outputs += rows;
  }
  require(outputs > 0 && outputs <= INT32_MAX, "a matrix must have outputs");
  if (bias.shape(0) > 0) require_length("bias", bias, outputs);
  const float* bias_data = bias.shape(0) > 0 ? bias.data() : nullptr;
  const Quantization target = parse_quantization(quantization);
  const Turn turn(cpu);
  return paceline::pack_linear(packed, inputs, bias_data, target, cpu.machine);
}

std::vector<std::string> level_names() {
  std::vector<std::string> names;
  for (const Kernels* level : runnable_levels()) names.emplace_back(level->name);
  return names;
}

std::string linear_form(const std::string& encoding, const std::string& quantization) {
  return form_name(form_of(parse_encoding(encoding), parse_quantization(quantization)));
}

std::string stored_form(const std::vector<const PackedLinear*>& linears) {
  std::string form;
  for (const PackedLinear* linear : linears) {
    for (const Section& section : linear->sections) {
      const std::string name = form_name(section.form);
      if (form.find(name) == std::string::npos) form += (form.empty() ? "" : "+") + name;
    }
  }
  return form;
}

void decode_bytes(const std::string& encoding_name, const Bytes& data, const Array<float, 1>& out) {
  const Encoding encoding = parse_encoding(encoding_name);
  const int64_t count = static_cast<int64_t>(out.shape(0));
  require(count % block_elements(encoding) == 0, "the numbers must fill whole blocks of " + encoding_name);
  require_length("data", data, row_bytes(encoding, count));
  decode(encoding, data.data(), count, out.data());
}

}  // namespace

Cpu::Cpu(int num_threads, const std::string& isa) : machine(checked(num_threads), find_level(isa)) {}

Experts::Experts(nb::list gate_ups, nb::list downs) : gate_up(std::move(gate_ups)), down(std::move(downs)), shared{} {
  const size_t count = gate_up.size();
  require(count >= 1 && count <= kMaxExperts && down.size() == count,
          "there must be as many down matrices as pairs of gate and up, 1 .. " + std::to_string(kMaxExperts));
  for (size_t e = 0; e < count; ++e) {
    const PackedLinear& first = nb::cast<const PackedLinear&>(gate_up[e]);
    const PackedLinear& second = nb::cast<const PackedLinear&>(down[e]);
    if (e == 0) {
      shared.width = first.inputs;
      shared.hidden = second.inputs;
    }
    if (first.inputs != shared.width || first.outputs != 2 * static_cast<int64_t>(shared.hidden) ||
        second.inputs != shared.hidden || second.outputs != shared.width) {
      refuse("expert " + std::to_string(e) + ": gate and up [" + std::to_string(first.outputs) + ", " +
             std::to_string(first.inputs) + "] and down [" + std::to_string(second.outputs) + ", " +
             std::to_string(second.inputs) + "] do not fit together, or not the first expert");
    }
    shared.gate_up.push_back(&first);
    shared.down.push_back(&second);
  }
}

HeadShape head_shape(const Heads& heads) {
  const auto [num_q, num_kv, head_dim] = heads;
  require(num_kv > 0 && num_q > 0 && num_q % num_kv == 0 && head_dim > 0,
          "the number of query heads must be a multiple of that of key heads");
  return {num_q, num_kv, head_dim};
}

NB_MODULE(_native, m) {
  m.doc() = "Paceline's native kernels.";
  nb::set_leak_warnings(false);  // an object that lives until the interpreter ends is no leak
  m.def("levels", &level_names, "Instruction sets that this machine can run, the widest first.");
  m.def("decode", &decode_bytes, nb::arg("encoding"), nb::arg("data").noconvert(), nb::arg("out").noconvert(),
        "Numbers of a checkpoint tensor as float32.");
  m.def("linear_form", &linear_form, nb::arg("encoding"), nb::arg("quantization"));
  m.def("kv_block_bytes", &kv_block_bytes, nb::arg("num_layers"), nb::arg("num_kv"), nb::arg("head_dim"),
        nb::arg("block_size"));

  nb::class_<PackedLinear>(m, "Linear")
      .def_ro("num_outputs", &PackedLinear::outputs)
      .def_ro("num_inputs", &PackedLinear::inputs)
      .def_prop_ro("form", [](const PackedLinear& self) { return stored_form({&self}); })
      .def_prop_ro("nbytes", &PackedLinear::bytes);

  nb::class_<Experts>(m, "Experts")
      .def(nb::init<nb::list, nb::list>(), nb::arg("gate_up"), nb::arg("down"))
      .def_prop_ro("num_experts", [](const Experts& self) { return self.shared.count(); })
      .def_prop_ro("width", [](const Experts& self) { return self.shared.width; })
      .def_prop_ro("form", [](const Experts& self) { return stored_form(self.shared.all()); })
      .def_prop_ro("nbytes", [](const Experts& self) {
        int64_t sum = 0;
        for (const PackedLinear* weight : self.shared.all()) sum += weight->bytes();
        return sum;
      });

  nb::class_<Embedding>(m, "Embedding")
      .def(
          "__init__",
          [](Embedding* self, const std::string& name, int64_t rows, int width, const Bytes& table) {
            const Encoding encoding = parse_encoding(name);
            require(width > 0 && width % block_elements(encoding) == 0,
                    "rows of " + std::to_string(width) + " do not fill whole blocks of " + name);
            require_length("the table's data", table, rows * row_bytes(encoding, width));
            new (self) Embedding{encoding, rows, width, table};
          },
          nb::arg("encoding"), nb::arg("rows"), nb::arg("width"), nb::arg("table").noconvert())
      .def_ro("num_rows", &Embedding::rows)
      .def_ro("width", &Embedding::width)
      .def_prop_ro("nbytes", [](const Embedding& self) { return self.table.shape(0); });

  nb::class_<KvStore>(m, "KvStore")
      .def(nb::init<int, int, int, int, int>(), nb::arg("num_layers"), nb::arg("num_kv"), nb::arg("head_dim"),
           nb::arg("num_blocks"), nb::arg("block_size"))
      .def_ro("num_blocks", &KvStore::num_blocks)
      .def_prop_ro("block_size", [](const KvStore& self) { return self.view.block_size; })
      .def_prop_ro("nbytes", [](const KvStore& self) { return self.memory.size(); })
      .def_prop_ro(
          "memory",
          [](KvStore& self) {
            return nb::ndarray<nb::numpy, uint16_t, nb::ndim<1>>(
                self.memory.data(), {static_cast<size_t>(self.memory.size()) / sizeof(uint16_t)}, nb::find(self));
          },
          "All of it as bits, for tests that poison what must not be read.");

  nb::class_<Cpu> cpu(m, "Cpu");
  cpu.def(nb::init<int, std::string>(), nb::arg("num_threads"), nb::arg("isa"))
      .def_prop_ro("num_threads", [](const Cpu& self) { return self.machine.pool.size(); })
      .def_prop_ro("isa", [](const Cpu& self) { return self.machine.kernels.name; })
      .def_prop_ro("bf16_name", [](const Cpu& self) { return self.machine.kernels.bf16_name; })
      .def("pack_linear", &pack_linear, nb::arg("parts"), nb::arg("inputs"), nb::arg("bias").noconvert(),
           nb::arg("quantization"));
  bind_layers(cpu);
  bind_choice(cpu);
  bind_program(m);
}

}  // namespace paceline::bindings
