// The operations of the layers as Python calls them.
#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "encoder_attention.h"
#include "linear.h"
#include "operations.h"

namespace paceline::bindings {
namespace {

void linear(Cpu& cpu, const FloatRows& x, const PackedLinear& weight, const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  require_shape("x", x, rows, weight.inputs);
  require_shape("out", out, rows, weight.outputs);
  const Turn turn(cpu);
  const int64_t scratch_bytes = linear_scratch(rows, weight, cpu.machine.kernels);
  cpu.machine.run(linear_work(rows, weight), scratch_bytes, [&](const Team& team, uint8_t* scratch) {
    paceline::linear(team, x.data(), rows, weight, out.data(), scratch);
  });
}

void embed(Cpu& cpu, const Ints& ids, const Embedding& table, float scale, const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(ids.shape(0));
  require_range("token id", ids.data(), rows, table.rows);
  require_shape("out", out, rows, table.width);
  const Turn turn(cpu);
  run_rows(cpu, rows, table.width, [&](const Team& team) {
    paceline::embed(team, ids.data(), rows, table.encoding, table.table.data(), table.width, scale, out.data());
  });
}

void rms_norm(Cpu& cpu, const FloatRows& x, const Floats& weight, float eps, const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require_length("weight", weight, width);
  require_shape("out", out, rows, width);
  const Turn turn(cpu);
  run_rows(cpu, rows, width, [&](const Team& team) {
    paceline::rms_norm(team, x.data(), weight.data(), eps, rows, static_cast<int>(width), out.data());
  });
}

void add_rms_norm(Cpu& cpu, const FloatRowsOut& residual, const FloatRows& update, const Floats& weight, float eps,
                  const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(residual.shape(0)), width = static_cast<int64_t>(residual.shape(1));
  require_shape("update", update, rows, width);
  require_length("weight", weight, width);
  require_shape("out", out, rows, width);
  const Turn turn(cpu);
  run_rows(cpu, rows, width, [&](const Team& team) {
    paceline::add_rms_norm(team, residual.data(), update.data(), weight.data(), eps, rows, static_cast<int>(width),
                           out.data());
  });
}

void qk_norm(Cpu& cpu, const FloatRowsOut& qkv, const Heads& heads, const Floats& q_weight, const Floats& k_weight,
             float eps) {
  const HeadShape shape = head_shape(heads);
  const int64_t rows = static_cast<int64_t>(qkv.shape(0));
  require_shape("qkv", qkv, rows, row_width(shape));
  require_length("q_weight", q_weight, shape.head_dim);
  require_length("k_weight", k_weight, shape.head_dim);
  const Turn turn(cpu);
  run_rows(cpu, rows, row_width(shape), [&](const Team& team) {
    paceline::qk_norm(team, qkv.data(), shape, q_weight.data(), k_weight.data(), eps, rows);
  });
}

void layer_norm(Cpu& cpu, const FloatRows& x, const Floats& weight, const Floats& bias, float eps,
                const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require_length("weight", weight, width);
  require_length("bias", bias, width);
  require_shape("out", out, rows, width);
  const Turn turn(cpu);
  run_rows(cpu, rows, width, [&](const Team& team) {
    paceline::layer_norm(team, x.data(), weight.data(), bias.data(), eps, rows, static_cast<int>(width), out.data());
  });
}

void rope(Cpu& cpu, const FloatRowsOut& qkv, const Heads& heads, const Positions& positions, const FloatRows& cos,
          const FloatRows& sin, bool neighbours, const Ints& axes) {
  const HeadShape shape = head_shape(heads);
  const int64_t rows = static_cast<int64_t>(qkv.shape(0));
  require_shape("qkv", qkv, rows, row_width(shape));
  const RopeTable table = rope_table(shape, cos, sin, neighbours, axes);
  const int count = check_positions(positions, rows, num_axes(table), static_cast<int64_t>(cos.shape(0)));
  const Turn turn(cpu);
  run_rows(cpu, rows, row_width(shape),
           [&](const Team& team) { paceline::rope(team, qkv.data(), shape, positions.data(), count, table, rows); });
}

void gated_activation(Cpu& cpu, const FloatRows& gate_up, const std::string& name, const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(gate_up.shape(0)), width = static_cast<int64_t>(gate_up.shape(1)) / 2;
  require_shape("gate_up", gate_up, rows, 2 * width);
  require_shape("out", out, rows, width);
  const Function function = parse_function(name);
  const Turn turn(cpu);
  run_rows(cpu, rows, 4 * width, [&](const Team& team) {
    paceline::gated_activation(team, gate_up.data(), function, rows, static_cast<int>(width), out.data());
  });
}

void activate(Cpu& cpu, const FloatRowsOut& x, const std::string& name) {
  const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  const Function function = parse_function(name);
  const Turn turn(cpu);
  run_rows(cpu, rows, 4 * width, [&](const Team& team) { paceline::activate(team, x.data(), function, rows, width); });
}

void add(Cpu& cpu, const FloatRowsOut& x, const FloatRows& y) {
  const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require_shape("the update", y, rows, width);
  const Turn turn(cpu);
  run_rows(cpu, rows, width, [&](const Team& team) { paceline::add(team, x.data(), y.data(), rows, width); });
}

void route(Cpu& cpu, const FloatRows& logits, const RoutingRule& rule, const Floats& bias, const IntRowsOut& ids,
           const FloatRowsOut& weights) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0));
  const Routing routing = parse_routing(rule, static_cast<int64_t>(logits.shape(1)), bias);
  require_shape("ids", ids, rows, routing.top_k);
  require_shape("weights", weights, rows, routing.top_k);
  const Turn turn(cpu);
  run_rows(cpu, rows, route_work(routing),
           [&](const Team& team) { paceline::route(team, logits.data(), routing, rows, ids.data(), weights.data()); });
}

void run_experts(Cpu& cpu, const FloatRows& x, const IntRows& ids, const FloatRows& weights, const Experts& experts,
                 const std::string& activation, const FloatRowsOut& out) {
  const int64_t rows = static_cast<int64_t>(x.shape(0)), top_k = static_cast<int64_t>(ids.shape(1));
  require_shape("x", x, rows, experts.shared.width);
  require_shape("ids", ids, rows, top_k);
  require_shape("weights", weights, rows, top_k);
  require_shape("out", out, rows, experts.shared.width);
  require_range("expert", ids.data(), rows * top_k, experts.shared.count());
  const Function function = parse_function(activation);
  const ExpertChoice choice{ids.data(), weights.data(), static_cast<int>(top_k)};
  const Turn turn(cpu);
  const int64_t scratch_bytes = experts_scratch(rows, choice.top_k, experts.shared, cpu.machine.kernels);
  cpu.machine.run(experts_work(rows, choice.top_k, experts.shared), scratch_bytes,
                  [&](const Team& team, uint8_t* scratch) {
                    paceline::run_experts(team, x.data(), rows, choice, experts.shared, function, out.data(), scratch);
                  });
}

void softcap(Cpu& cpu, const FloatRowsOut& x, float cap) {
  const int64_t rows = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require(cap > 0.0f, "cap must be above 0");
  const Turn turn(cpu);
  run_rows(cpu, rows, 4 * width, [&](const Team& team) { paceline::softcap(team, x.data(), cap, rows, width); });
}

void take_rows(Cpu& cpu, const FloatRows& x, const Ints& rows, const FloatRowsOut& out) {
  const int64_t count = static_cast<int64_t>(rows.shape(0)), width = static_cast<int64_t>(x.shape(1));
  require_range("row", rows.data(), count, static_cast<int64_t>(x.shape(0)));
  require_shape("out", out, count, width);
  const Turn turn(cpu);
  run_rows(cpu, count, width, [&](const Team& team) {
    paceline::take_rows(team, x.data(), rows.data(), count, static_cast<int>(width), out.data());
  });
}

void write_kv(Cpu& cpu, const FloatRows& qkv, const Heads& heads, const KvStore& store, int layer,
              const Ints& kv_rows) {
  const HeadShape shape = head_shape(heads);
  store.require_layer(layer, shape);
  const KvView kv = store.layer(layer);
  const int64_t rows = static_cast<int64_t>(qkv.shape(0));
  require_shape("qkv", qkv, rows, row_width(shape));
  require_length("kv_rows", kv_rows, rows);
  require_range("store row", kv_rows.data(), rows, store.num_rows());
  const Turn turn(cpu);
  run_rows(cpu, rows, row_width(shape),
           [&](const Team& team) { paceline::write_kv(team, qkv.data(), shape, kv, kv_rows.data(), rows); });
}

void attention(Cpu& cpu, const FloatRows& qkv, const Heads& heads, const KvStore& store, int layer,
               const Ints& span_starts, const Ints& context_lens, const IntRows& block_tables, float scale, int window,
               float softcap, const FloatRowsOut& out) {
  const HeadShape shape = head_shape(heads);
  store.require_layer(layer, shape);
  const KvView kv = store.layer(layer);
  const int64_t rows = static_cast<int64_t>(qkv.shape(0));
  require_shape("qkv", qkv, rows, row_width(shape));
  require_shape("out", out, rows, static_cast<int64_t>(shape.num_q) * shape.head_dim);
  const AttentionSpans spans = attention_spans(span_starts, context_lens, block_tables, rows, window, store);
  const Turn turn(cpu);
  const AttentionPlan plan = plan_attention(spans, shape.num_q / shape.num_kv, window);
  const int64_t scratch_bytes = attention_scratch(shape, cpu.machine.pool.size());
  cpu.machine.run(attention_work(plan, shape), scratch_bytes, [&](const Team& team, uint8_t* scratch) {
    paceline::attention(team, plan, qkv.data(), shape, kv, scale, softcap, out.data(), scratch);
  });
}

void encoder_attention(Cpu& cpu, const FloatRows& qkv, const Heads& heads, const Ints& segment_starts, float scale,
                       float softcap, const FloatRowsOut& out) {
  const HeadShape shape = head_shape(heads);
  const int64_t rows = static_cast<int64_t>(qkv.shape(0));
  require_shape("qkv", qkv, rows, row_width(shape));
  require_shape("out", out, rows, static_cast<int64_t>(shape.num_q) * shape.head_dim);
  const int64_t segments = static_cast<int64_t>(segment_starts.shape(0)) - 1;
  const int32_t* starts = segment_starts.data();
  require(segments >= 0 && starts[0] == 0 && starts[segments] == rows && std::is_sorted(starts, starts + segments + 1),
          "segment_starts must ascend from 0 to the number of rows");
  const Turn turn(cpu);
  const EncoderPlan plan = plan_encoder_attention(starts, segments);
  cpu.machine.run(encoder_attention_work(plan, shape), encoder_attention_scratch(plan, shape, cpu.machine.pool.size()),
                  [&](const Team& team, uint8_t* scratch) {
                    paceline::encoder_attention(team, plan, qkv.data(), shape, scale, softcap, out.data(), scratch);
                  });
}

}  // namespace

Routing parse_routing(const RoutingRule& rule, int64_t num_experts, const Floats& bias) {
  const auto& [top_k, scoring, renormalize, scale, num_groups, top_groups] = rule;
  require(num_experts >= 1 && num_experts <= kMaxExperts,
          "a router must have 1 .. " + std::to_string(kMaxExperts) + " experts, not " + std::to_string(num_experts));
  require(num_groups >= 1 && num_experts % num_groups == 0,
          std::to_string(num_experts) + " experts do not make " + std::to_string(num_groups) + " groups");
  require(top_groups >= 1 && top_groups <= num_groups, "top_groups must be 1 .. the number of groups");
  const int64_t choice = num_experts / num_groups * top_groups;
  require(top_k >= 1 && top_k <= choice,
          "top_k must be 1 .. the " + std::to_string(choice) + " experts to choose from");
  require(scoring == "softmax" || scoring == "sigmoid", "scoring must be softmax or sigmoid, not " + scoring);
  if (bias.shape(0) > 0) require_length("bias", bias, num_experts);
  return {static_cast<int>(num_experts),
          top_k,
          scoring == "sigmoid",
          renormalize,
          scale,
          num_groups,
          top_groups,
          bias.shape(0) > 0 ? bias.data() : nullptr};
}

Function parse_function(const std::string& name) {
  if (name == "silu") return Function::silu;
  if (name == "gelu_tanh") return Function::gelu_tanh;
  if (name == "gelu") return Function::gelu;
  if (name == "quick_gelu") return Function::quick_gelu;
  throw std::invalid_argument("activation must be silu, gelu_tanh, gelu or quick_gelu, not " + name);
}

RopeTable rope_table(HeadShape heads, const FloatRows& cos, const FloatRows& sin, bool neighbours, const Ints& axes) {
  const int64_t half = static_cast<int64_t>(cos.shape(1));
  require_shape("sin", sin, static_cast<int64_t>(cos.shape(0)), half);
  require(2 * half <= heads.head_dim, "the rotated width exceeds the head");
  if (axes.shape(0) > 0) require_length("axes", axes, half);
  require_range("axis", axes.data(), static_cast<int64_t>(axes.shape(0)), INT32_MAX);
  return {cos.data(), sin.data(), static_cast<int>(half), neighbours ? RopePairs::neighbours : RopePairs::halves,
          axes.shape(0) > 0 ? axes.data() : nullptr};
}

int num_axes(const RopeTable& table) {
  return table.axes && table.half > 0 ? *std::max_element(table.axes, table.axes + table.half) + 1 : 1;
}

int check_positions(const Positions& positions, int64_t rows, int needed, int64_t limit) {
  require(positions.ndim() == 1 || positions.ndim() == 2, "positions must be [rows] or [rows, axes]");
  require_length("positions", positions, rows);
  const int64_t count = positions.ndim() == 1 ? 1 : static_cast<int64_t>(positions.shape(1));
  if (count < needed || count > INT32_MAX) {
    refuse("the rotation needs " + std::to_string(needed) + " positions for each row, not " + std::to_string(count));
  }
  require_range("position", positions.data(), rows * count, limit);
  return static_cast<int>(count);
}

AttentionSpans attention_spans(const Ints& span_starts, const Ints& context_lens, const IntRows& block_tables,
                               int64_t rows, int window, const KvStore& store) {
  const int block_size = store.view.block_size;
  require(window >= 0, "window must not be negative");
  const AttentionSpans spans{static_cast<int>(context_lens.shape(0)), span_starts.data(), context_lens.data(),
                             block_tables.data(), static_cast<int64_t>(block_tables.shape(1))};
  require_length("span_starts", span_starts, spans.count + 1);
  require_length("block_tables", block_tables, spans.count);
  require(spans.starts[0] == 0 && spans.starts[spans.count] == rows,
          "span_starts must run from 0 to the number of rows");
  for (int s = 0; s < spans.count; ++s) {
    const int64_t tokens = static_cast<int64_t>(spans.starts[s + 1]) - spans.starts[s];
    const int64_t context = spans.context_lens[s];
    require(tokens >= 0 && context >= 0, "span_starts must ascend and context_lens must not be negative");
    if (tokens == 0) continue;
    const int64_t first = window > 0 && context >= window ? (context - window + 1) / block_size : 0;
    const int64_t last = (context + tokens + block_size - 1) / block_size;
    if (last > spans.width) {
      refuse(std::to_string(context + tokens) + " tokens need " + std::to_string(last) +
             " blocks, but the block table has " + std::to_string(spans.width));
    }
    require_range("block", spans.block_tables + s * spans.width + first, last - first, store.num_blocks);
  }
  return spans;
}

void bind_layers(nb::class_<Cpu>& cpu) {
  cpu.def("linear", &linear, nb::arg("x").noconvert(), nb::arg("weight"), nb::arg("out").noconvert())
      .def("embed", &embed, nb::arg("ids").noconvert(), nb::arg("table"), nb::arg("scale"), nb::arg("out").noconvert())
      .def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
           nb::arg("out").noconvert())
      .def("add_rms_norm", &add_rms_norm, nb::arg("residual").noconvert(), nb::arg("update").noconvert(),
           nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert())
      .def("qk_norm", &qk_norm, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("q_weight").noconvert(),
           nb::arg("k_weight").noconvert(), nb::arg("eps"))
      .def("rope", &rope, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("positions").noconvert(),
           nb::arg("cos").noconvert(), nb::arg("sin").noconvert(), nb::arg("neighbours"), nb::arg("axes").noconvert())
      .def("layer_norm", &layer_norm, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
           nb::arg("bias").noconvert(), nb::arg("eps"), nb::arg("out").noconvert())
      .def("gated_activation", &gated_activation, nb::arg("gate_up").noconvert(), nb::arg("activation"),
           nb::arg("out").noconvert())
      .def("route", &route, nb::arg("logits").noconvert(), nb::arg("rule"), nb::arg("bias").noconvert(),
           nb::arg("ids").noconvert(), nb::arg("weights").noconvert())
      .def("experts", &run_experts, nb::arg("x").noconvert(), nb::arg("ids").noconvert(),
           nb::arg("weights").noconvert(), nb::arg("experts"), nb::arg("activation"), nb::arg("out").noconvert())
      .def("activate", &activate, nb::arg("x").noconvert(), nb::arg("activation"))
      .def("add", &add, nb::arg("x").noconvert(), nb::arg("update").noconvert())
      .def("softcap", &softcap, nb::arg("x").noconvert(), nb::arg("cap"))
      .def("take_rows", &take_rows, nb::arg("x").noconvert(), nb::arg("rows").noconvert(), nb::arg("out").noconvert())
      .def("write_kv", &write_kv, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("kv"), nb::arg("layer"),
           nb::arg("kv_rows").noconvert())
      .def("attention", &attention, nb::arg("qkv").noconvert(), nb::arg("heads"), nb::arg("kv"), nb::arg("layer"),
           nb::arg("span_starts").noconvert(), nb::arg("context_lens").noconvert(), nb::arg("block_tables").noconvert(),
           nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("out").noconvert())
      .def("encoder_attention", &encoder_attention, nb::arg("qkv").noconvert(), nb::arg("heads"),
           nb::arg("segment_starts").noconvert(), nb::arg("scale"), nb::arg("softcap"), nb::arg("out").noconvert());
}

}  // namespace paceline::bindings
