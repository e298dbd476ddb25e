// The native module: Python's arrays in, checked, and plain pointers out. The interpreter's lock is released while the
// kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "choice.h"
#include "encodings.h"
#include "levels.h"
#include "linear.h"
#include "operations.h"
#include "pack.h"
#include "team.h"

namespace nb = nanobind;

namespace paceline {
namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float, 1>;
using FloatRows = Array<const float, 2>;
using FloatRowsOut = Array<float, 2>;
using Ints = Array<const int32_t, 1>;
using IntRows = Array<const int32_t, 2>;
using Bytes = Array<const uint8_t, 1>;
using IntsOut = Array<int32_t, 1>;
using FloatsOut = Array<float, 1>;
using IntRowsOut = Array<int32_t, 2>;

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

template <class A>
void require_shape(const char* name, const A& array, int64_t rows, int64_t columns) {
  require(static_cast<int64_t>(array.shape(0)) == rows && static_cast<int64_t>(array.shape(1)) == columns,
          std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "], not [" +
              std::to_string(array.shape(0)) + ", " + std::to_string(array.shape(1)) + "]");
}

template <class A>
void require_length(const char* name, const A& array, int64_t length) {
  require(static_cast<int64_t>(array.shape(0)) == length, std::string(name) + " must have " + std::to_string(length) +
                                                              " entries, not " + std::to_string(array.shape(0)));
}

void require_range(const char* name, const int32_t* numbers, int64_t count, int64_t limit) {
  // Unsigned, a negative number is a large one; the loop has no branch.
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(numbers[i]));
  if (count > 0 && largest >= limit) {
    throw std::invalid_argument(std::string(name) + " " + std::to_string(static_cast<int32_t>(largest)) +
                                " is outside 0 .. " + std::to_string(limit - 1));
  }
}

// Lists of token ids by row: starts [rows + 1], and as many ids as the last one says.
void require_lists(const char* name, const Ints& starts, const Ints& ids, int64_t rows, int64_t width) {
  require_length("starts", starts, rows + 1);
  require(starts.data()[0] == 0, std::string(name) + "_starts must begin with 0");
  for (int64_t r = 0; r < rows; ++r) {
    require(starts.data()[r] <= starts.data()[r + 1], std::string(name) + "_starts must ascend");
  }
  // More ids than the rows use are checked too.
  const int64_t count = static_cast<int64_t>(ids.shape(0));
  require(starts.data()[rows] <= count, std::string(name) + "_ids are fewer than " + name + "_starts say");
  require_range((std::string("token id outside the vocabulary: ") + name + " id").c_str(), ids.data(), count, width);
}

struct Embedding {
  Encoding encoding;
  int64_t rows;
  int width;
  Bytes table;  // keeps the file's memory map alive
};

struct KvStore {
  int num_layers, num_blocks;
  int64_t layer_stride;
  KvView view;  // of layer 0
  Buffer memory;

  KvView layer(int index) const {
    require(index >= 0 && index < num_layers,
            "layer " + std::to_string(index) + " is outside 0 .. " + std::to_string(num_layers - 1));
    KvView kv = view;
    kv.data += index * layer_stride;
    return kv;
  }
};

KvView kv_shape(int num_kv, int head_dim, int block_size) {
  require(block_size >= 1, "block_size must be at least 1, not " + std::to_string(block_size));
  require(head_dim > 0 && head_dim % 2 == 0, "head_dim must be even, not " + std::to_string(head_dim));
  require(num_kv > 0, "num_kv must be at least 1");
  KvView kv{nullptr, 0, 0, block_size, head_dim, num_kv};
  kv.head_stride = kv.keys_size() + static_cast<int64_t>(block_size) * kv.value_width();
  kv.block_stride = kv.head_stride * num_kv;
  return kv;
}

int64_t kv_block_bytes(int num_layers, int num_kv, int head_dim, int block_size) {
  return kv_shape(num_kv, head_dim, block_size).block_stride * num_layers * static_cast<int64_t>(sizeof(uint16_t));
}

HeadShape head_shape(const std::tuple<int, int, int>& heads) {
  const auto [num_q, num_kv, head_dim] = heads;
  require(num_kv > 0 && num_q > 0 && num_q % num_kv == 0 && head_dim > 0,
          "the number of query heads must be a multiple of that of key heads");
  return {num_q, num_kv, head_dim};
}

Quantization parse_quantization(const std::string& name) {
  if (name.empty()) return Quantization::none;
  if (name == "int8") return Quantization::int8;
  if (name == "int4") return Quantization::int4;
  throw std::invalid_argument("quantization must be int8 or int4, not " + name);
}

// The threads, the level and the scratch memory; one operation runs at a time.
class Cpu {
 public:
  Cpu(int num_threads, const std::string& isa) : machine_(checked(num_threads), find_level(isa)) {}

  int num_threads() const { return machine_.pool.size(); }
  std::string isa() const { return machine_.kernels.name; }

  PackedLinear pack_linear(const std::vector<std::tuple<std::string, int64_t, Bytes>>& parts, int inputs,
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
    const Turn turn(turn_);
    return paceline::pack_linear(packed, inputs, bias_data, target, machine_.pool);
  }

  void linear(const FloatRows& x, const PackedLinear& weight, const FloatRowsOut& out) {
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    require_shape("x", x, rows, weight.inputs);
    require_shape("out", out, rows, weight.outputs);
    const Turn turn(turn_);
    machine_.run(linear_work(rows, weight), linear_scratch(rows, weight), [&](const Team& team, uint8_t* scratch) {
      paceline::linear(team, x.data(), rows, weight, out.data(), scratch);
    });
  }

  void embed(const Ints& ids, const Embedding& table, float scale, const FloatRowsOut& out) {
    const int64_t rows = static_cast<int64_t>(ids.shape(0));
    require_range("token id", ids.data(), rows, table.rows);
    require_shape("out", out, rows, table.width);
    const Turn turn(turn_);
    run_rows(rows, table.width, [&](const Team& team) {
      paceline::embed(team, ids.data(), rows, table.encoding, table.table.data(), table.width, scale, out.data());
    });
  }

  void rms_norm(const FloatRows& x, const Floats& weight, float eps, const FloatRowsOut& out) {
    const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
    require_length("weight", weight, width);
    require_shape("out", out, rows, width);
    const Turn turn(turn_);
    run_rows(rows, width, [&](const Team& team) {
      paceline::rms_norm(team, x.data(), weight.data(), eps, rows, static_cast<int>(width), out.data());
    });
  }

  void add_rms_norm(const FloatRowsOut& residual, const FloatRows& update, const Floats& weight, float eps,
                    const FloatRowsOut& out) {
    const int64_t rows = static_cast<int64_t>(residual.shape(0)), width = static_cast<int64_t>(residual.shape(1));
    require_shape("update", update, rows, width);
    require_length("weight", weight, width);
    require_shape("out", out, rows, width);
    const Turn turn(turn_);
    run_rows(rows, width, [&](const Team& team) {
      paceline::add_rms_norm(team, residual.data(), update.data(), weight.data(), eps, rows, static_cast<int>(width),
                             out.data());
    });
  }

  void qk_norm(const FloatRowsOut& qkv, const std::tuple<int, int, int>& heads, const Floats& q_weight,
               const Floats& k_weight, float eps) {
    const HeadShape shape = head_shape(heads);
    const int64_t rows = static_cast<int64_t>(qkv.shape(0));
    require_shape("qkv", qkv, rows, row_width(shape));
    require_length("q_weight", q_weight, shape.head_dim);
    require_length("k_weight", k_weight, shape.head_dim);
    const Turn turn(turn_);
    run_rows(rows, row_width(shape), [&](const Team& team) {
      paceline::qk_norm(team, qkv.data(), shape, q_weight.data(), k_weight.data(), eps, rows);
    });
  }

  void rope(const FloatRowsOut& qkv, const std::tuple<int, int, int>& heads, const Ints& positions,
            const FloatRows& cos, const FloatRows& sin, bool neighbours) {
    const HeadShape shape = head_shape(heads);
    const int64_t rows = static_cast<int64_t>(qkv.shape(0));
    const int64_t half = static_cast<int64_t>(cos.shape(1));
    require_shape("qkv", qkv, rows, row_width(shape));
    require_length("positions", positions, rows);
    require_shape("sin", sin, static_cast<int64_t>(cos.shape(0)), half);
    require(2 * half <= shape.head_dim, "the rotated width exceeds the head");
    require_range("position", positions.data(), rows, static_cast<int64_t>(cos.shape(0)));
    const Turn turn(turn_);
    run_rows(rows, row_width(shape), [&](const Team& team) {
      paceline::rope(team, qkv.data(), shape, positions.data(), cos.data(), sin.data(), static_cast<int>(half),
                     neighbours ? RopePairs::neighbours : RopePairs::halves, rows);
    });
  }

  void gated_activation(const FloatRows& gate_up, bool gelu, const FloatRowsOut& out) {
    const int64_t rows = static_cast<int64_t>(gate_up.shape(0)), width = static_cast<int64_t>(gate_up.shape(1)) / 2;
    require_shape("gate_up", gate_up, rows, 2 * width);
    require_shape("out", out, rows, width);
    const Turn turn(turn_);
    run_rows(rows, 4 * width, [&](const Team& team) {
      paceline::gated_activation(team, gate_up.data(), gelu ? Gate::gelu_tanh : Gate::silu, rows,
                                 static_cast<int>(width), out.data());
    });
  }

  void softcap(const FloatRowsOut& x, float cap) {
    const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
    require(cap > 0.0f, "cap must be above 0");
    const Turn turn(turn_);
    run_rows(rows, 4 * width, [&](const Team& team) { paceline::softcap(team, x.data(), cap, rows, width); });
  }

  void take_rows(const FloatRows& x, const Ints& rows, const FloatRowsOut& out) {
    const int64_t count = static_cast<int64_t>(rows.shape(0)), width = static_cast<int64_t>(x.shape(1));
    require_range("row", rows.data(), count, static_cast<int64_t>(x.shape(0)));
    require_shape("out", out, count, width);
    const Turn turn(turn_);
    run_rows(count, width, [&](const Team& team) {
      paceline::take_rows(team, x.data(), rows.data(), count, static_cast<int>(width), out.data());
    });
  }

  void write_kv(const FloatRows& qkv, const std::tuple<int, int, int>& heads, const KvStore& store, int layer,
                const Ints& kv_rows) {
    const HeadShape shape = head_shape(heads);
    const KvView kv = checked_layer(store, layer, shape);
    const int64_t rows = static_cast<int64_t>(qkv.shape(0));
    require_shape("qkv", qkv, rows, row_width(shape));
    require_length("kv_rows", kv_rows, rows);
    require_range("store row", kv_rows.data(), rows, static_cast<int64_t>(store.num_blocks) * kv.block_size);
    const Turn turn(turn_);
    run_rows(rows, row_width(shape),
             [&](const Team& team) { paceline::write_kv(team, qkv.data(), shape, kv, kv_rows.data(), rows); });
  }

  void attention(const FloatRows& qkv, const std::tuple<int, int, int>& heads, const KvStore& store, int layer,
                 const Ints& span_starts, const Ints& context_lens, const IntRows& block_tables, float scale,
                 int window, float softcap, const FloatRowsOut& out) {
    const HeadShape shape = head_shape(heads);
    const KvView kv = checked_layer(store, layer, shape);
    const int64_t rows = static_cast<int64_t>(qkv.shape(0));
    require_shape("qkv", qkv, rows, row_width(shape));
    require_shape("out", out, rows, static_cast<int64_t>(shape.num_q) * shape.head_dim);
    require(window >= 0, "window must not be negative");
    const AttentionSpans spans{static_cast<int>(context_lens.shape(0)), span_starts.data(), context_lens.data(),
                               block_tables.data(), static_cast<int64_t>(block_tables.shape(1))};
    require_length("span_starts", span_starts, spans.count + 1);
    require_length("block_tables", block_tables, spans.count);
    require(spans.starts[0] == 0 && spans.starts[spans.count] == rows,
            "span_starts must run from 0 to the rows of qkv");
    for (int s = 0; s < spans.count; ++s) {
      const int64_t tokens = static_cast<int64_t>(spans.starts[s + 1]) - spans.starts[s];
      const int64_t context = spans.context_lens[s];
      require(tokens >= 0 && context >= 0, "span_starts must ascend and context_lens must not be negative");
      if (tokens == 0) continue;
      const int64_t first = window > 0 && context >= window ? (context - window + 1) / kv.block_size : 0;
      const int64_t last = (context + tokens + kv.block_size - 1) / kv.block_size;
      require(last <= spans.width, std::to_string(context + tokens) + " tokens need " + std::to_string(last) +
                                       " blocks, but the block table has " + std::to_string(spans.width));
      require_range("block", spans.block_tables + s * spans.width + first, last - first, store.num_blocks);
    }
    const Turn turn(turn_);
    const AttentionPlan plan = plan_attention(spans, shape.num_q / shape.num_kv, window);
    const int64_t scratch_bytes = attention_scratch(shape, num_threads());
    machine_.run(attention_work(plan, shape), scratch_bytes, [&](const Team& team, uint8_t* scratch) {
      paceline::attention(team, plan, qkv.data(), shape, kv, scale, softcap, out.data(), scratch);
    });
  }

  void edit_logits(const FloatRowsOut& logits, int vocab_size, const Ints& allowed_rows,
                   const Array<const uint32_t, 2>& allowed_bits, const Ints& bias_starts, const Ints& bias_ids,
                   const Floats& bias_values, const Ints& seen_starts, const Ints& seen_ids, const Ints& seen_counts,
                   const Floats& repetition, const Floats& frequency, const Floats& presence, const Ints& banned_starts,
                   const Ints& banned_ids) {
    const int64_t rows = static_cast<int64_t>(logits.shape(0)), width = static_cast<int64_t>(logits.shape(1));
    require(vocab_size >= 0, "vocab_size must not be negative");
    require_range("allowed row", allowed_rows.data(), static_cast<int64_t>(allowed_rows.shape(0)), rows);
    if (allowed_rows.shape(0) > 0) {
      require_shape("allowed_bits", allowed_bits, static_cast<int64_t>(allowed_rows.shape(0)), (width + 31) / 32);
    }
    require_lists("bias", bias_starts, bias_ids, rows, width);
    require_length("bias_values", bias_values, static_cast<int64_t>(bias_ids.shape(0)));
    require_lists("seen", seen_starts, seen_ids, rows, width);
    require_length("seen_counts", seen_counts, static_cast<int64_t>(seen_ids.shape(0)));
    require_lists("banned", banned_starts, banned_ids, rows, width);
    require_length("repetition", repetition, rows);
    require_length("frequency", frequency, rows);
    require_length("presence", presence, rows);
    const EditLists edits{vocab_size,          allowed_rows.data(), static_cast<int>(allowed_rows.shape(0)),
                          allowed_bits.data(), (width + 31) / 32,   bias_starts.data(),
                          bias_ids.data(),     bias_values.data(),  seen_starts.data(),
                          seen_ids.data(),     seen_counts.data(),  repetition.data(),
                          frequency.data(),    presence.data(),     banned_starts.data(),
                          banned_ids.data()};
    const Turn turn(turn_);
    run_rows(rows, width, [&](const Team& team) {
      paceline::edit_logits(team, logits.data(), rows, static_cast<int>(width), edits);
    });
  }

  void choose(const FloatRows& logits, const Floats& temperature, const Ints& top_k, const Floats& top_p,
              const Floats& min_p, const Array<const uint64_t, 1>& seeds, const Ints& positions,
              const IntsOut& chosen) {
    const int64_t rows = static_cast<int64_t>(logits.shape(0));
    require_length("temperature", temperature, rows);
    require_length("top_k", top_k, rows);
    require_length("top_p", top_p, rows);
    require_length("min_p", min_p, rows);
    require_length("seeds", seeds, rows);
    require_length("positions", positions, rows);
    require_length("chosen", chosen, rows);
    const ChoiceRules rules{temperature.data(), top_k.data(), top_p.data(),
                            min_p.data(),       seeds.data(), positions.data()};
    const Turn turn(turn_);
    const int width = static_cast<int>(logits.shape(1));
    run_rows(rows, width, choice_scratch(width, num_threads()), [&](const Team& team, uint8_t* scratch) {
      paceline::choose(team, logits.data(), rows, width, rules, chosen.data(), scratch);
    });
  }

  void top_logprobs(const FloatRows& logits, const Ints& chosen, const FloatsOut& chosen_values, const IntsOut& ranks,
                    const IntRowsOut& top_ids, const FloatRowsOut& top_values) {
    const int64_t rows = static_cast<int64_t>(logits.shape(0)), width = static_cast<int64_t>(logits.shape(1));
    const int64_t k = static_cast<int64_t>(top_ids.shape(1));
    require_length("chosen", chosen, rows);
    require_range("token id outside the vocabulary: chosen id", chosen.data(), rows, width);
    require_length("chosen_values", chosen_values, rows);
    require_length("ranks", ranks, rows);
    require_shape("top_ids", top_ids, rows, k);
    require_shape("top_values", top_values, rows, k);
    require(k <= width, "k must not exceed the width");
    const Turn turn(turn_);
    const int64_t scratch_bytes = choice_scratch(static_cast<int>(width), num_threads());
    run_rows(rows, width, scratch_bytes, [&](const Team& team, uint8_t* scratch) {
      paceline::top_logprobs(team, logits.data(), rows, static_cast<int>(width), chosen.data(), static_cast<int>(k),
                             chosen_values.data(), ranks.data(), top_ids.data(), top_values.data(), scratch);
    });
  }

 private:
  // Held while an operation runs: no interpreter lock, and the scratch memory for oneself.
  class Turn {
   public:
    explicit Turn(std::mutex& mutex) : lock_(mutex) {}

   private:
    nb::gil_scoped_release release_;
    std::lock_guard<std::mutex> lock_;
  };

  // An operation that shares its rows: a single one wakes nobody.
  template <class F>
  void run_rows(int64_t rows, int64_t width, int64_t scratch_bytes, const F& operation) {
    machine_.run(rows < 2 ? 0 : rows * width, scratch_bytes, operation);
  }
  template <class F>
  void run_rows(int64_t rows, int64_t width, const F& operation) {
    run_rows(rows, width, 0, [&](const Team& team, uint8_t*) { operation(team); });
  }

  static int checked(int num_threads) {
    require(num_threads >= 1 && num_threads <= 1024, "num_threads must be 1 .. 1024");
    return num_threads;
  }

  static KvView checked_layer(const KvStore& store, int layer, HeadShape heads) {
    require(heads.num_kv == store.view.num_kv && heads.head_dim == store.view.head_dim,
            "the heads differ from those of the key-value store");
    return store.layer(layer);
  }

  Machine machine_;
  std::mutex turn_;
};

std::vector<std::string> level_names() {
  std::vector<std::string> names;
  for (const Kernels* level : runnable_levels()) names.emplace_back(level->name);
  return names;
}

std::string linear_form(const std::string& encoding, const std::string& quantization) {
  return form_name(form_of(parse_encoding(encoding), parse_quantization(quantization)));
}

std::string stored_form(const PackedLinear& linear) {
  std::string form;
  for (const Section& section : linear.sections) {
    const std::string name = form_name(section.form);
    if (form.find(name) == std::string::npos) form += (form.empty() ? "" : "+") + name;
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
      .def_prop_ro("form", &stored_form)
      .def_prop_ro("nbytes", &PackedLinear::bytes);

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
      .def(
          "__init__",
          [](KvStore* self, int num_layers, int num_kv, int head_dim, int num_blocks, int block_size) {
            require(num_layers > 0 && num_blocks >= 0, "a store needs layers, and no negative number of blocks");
            KvView view = kv_shape(num_kv, head_dim, block_size);
            const int64_t stride = view.block_stride * num_blocks;
            Buffer memory(stride * num_layers * static_cast<int64_t>(sizeof(uint16_t)));
            view.data = reinterpret_cast<uint16_t*>(memory.data());
            new (self) KvStore{num_layers, num_blocks, stride, view, std::move(memory)};
          },
          nb::arg("num_layers"), nb::arg("num_kv"), nb::arg("head_dim"), nb::arg("num_blocks"), nb::arg("block_size"))
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

  nb::class_<Cpu>(m, "Cpu")
      .def(nb::init<int, std::string>(), nb::arg("num_threads"), nb::arg("isa"))
      .def_prop_ro("num_threads", &Cpu::num_threads)
      .def_prop_ro("isa", &Cpu::isa)
      .def("pack_linear", &Cpu::pack_linear, nb::arg("parts"), nb::arg("inputs"), nb::arg("bias").noconvert(),
           nb::arg("quantization"))
      .def("linear", &Cpu::linear, nb::arg("x").noconvert(), nb::arg("weight"), nb::arg("out").noconvert())
      .def("embed", &Cpu::embed, nb::arg("ids").noconvert(), nb::arg("table"), nb::arg("scale"),
           nb::arg("out").noconvert())
      .def("rms_norm", &Cpu::rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
           nb::arg("out").noconvert())
      .def("add_rms_norm", &Cpu::add_rms_norm, nb::arg("residual").noconvert(), nb::arg("update").noconvert(),
           nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert())
      .def("qk_norm", &Cpu::qk_norm, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("q_weight").noconvert(),
           nb::arg("k_weight").noconvert(), nb::arg("eps"))
      .def("rope", &Cpu::rope, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("positions").noconvert(),
           nb::arg("cos").noconvert(), nb::arg("sin").noconvert(), nb::arg("neighbours"))
      .def("gated_activation", &Cpu::gated_activation, nb::arg("gate_up").noconvert(), nb::arg("gelu"),
           nb::arg("out").noconvert())
      .def("softcap", &Cpu::softcap, nb::arg("x").noconvert(), nb::arg("cap"))
      .def("take_rows", &Cpu::take_rows, nb::arg("x").noconvert(), nb::arg("rows").noconvert(),
           nb::arg("out").noconvert())
      .def("write_kv", &Cpu::write_kv, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("kv"), nb::arg("layer"),
           nb::arg("kv_rows").noconvert())
      .def("attention", &Cpu::attention, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("kv"), nb::arg("layer"),
           nb::arg("span_starts").noconvert(), nb::arg("context_lens").noconvert(), nb::arg("block_tables").noconvert(),
           nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("out").noconvert())
      .def("edit_logits", &Cpu::edit_logits, nb::arg("logits").noconvert(), nb::arg("vocab_size"),
           nb::arg("allowed_rows").noconvert(), nb::arg("allowed_bits").noconvert(), nb::arg("bias_starts").noconvert(),
           nb::arg("bias_ids").noconvert(), nb::arg("bias_values").noconvert(), nb::arg("seen_starts").noconvert(),
           nb::arg("seen_ids").noconvert(), nb::arg("seen_counts").noconvert(), nb::arg("repetition").noconvert(),
           nb::arg("frequency").noconvert(), nb::arg("presence").noconvert(), nb::arg("banned_starts").noconvert(),
           nb::arg("banned_ids").noconvert())
      .def("choose", &Cpu::choose, nb::arg("logits").noconvert(), nb::arg("temperature").noconvert(),
           nb::arg("top_k").noconvert(), nb::arg("top_p").noconvert(), nb::arg("min_p").noconvert(),
           nb::arg("seeds").noconvert(), nb::arg("positions").noconvert(), nb::arg("chosen").noconvert())
      .def("top_logprobs", &Cpu::top_logprobs, nb::arg("logits").noconvert(), nb::arg("chosen").noconvert(),
           nb::arg("chosen_values").noconvert(), nb::arg("ranks").noconvert(), nb::arg("top_ids").noconvert(),
           nb::arg("top_values").noconvert());
}

}  // namespace paceline
