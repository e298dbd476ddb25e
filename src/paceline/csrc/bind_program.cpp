// A program as Python writes it down, operation by operation, and runs it.
#include <algorithm>
#include <climits>
#include <map>
#include <string>

#include "attention.h"
#include "bindings.h"
#include "linear.h"
#include "operations.h"
#include "program.h"

namespace paceline::bindings {
namespace {

using Division = paceline::Program::Division;
using Run = paceline::Program::Run;

// Arrays are numbers. Weights are kept for as long as the program; what is said in operations.h about their operations
// is not said again.
class BoundProgram {
 public:
  explicit BoundProgram(Cpu& cpu) : cpu_(cpu) {}

  int embed(const Embedding& table, float scale) {
    begin();
    num_tokens_ = std::min(num_tokens_, table.rows);
    const int out = program_.add_array(table.width);
    const auto run = [&table, scale, out](const Team& team, const Run& run) {
      paceline::embed(team, run.input().token_ids, run.rows(), table.encoding, table.table.data(), table.width, scale,
                      run.at(out));
    };
    program_.add({run, Division::rows, {}, {out}});
    return out;
  }

  int linear(int x, const PackedLinear& weight) {
    begin();
    require_width("x", x, weight.inputs);
    const int out = program_.add_array(weight.outputs);
    const auto run = [&weight, x, out](const Team& team, const Run& run) {
      paceline::linear(team, run.at(x), run.rows(), weight, run.at(out), run.scratch());
    };
    const auto scratch = [&weight, &kernels = cpu_.machine.kernels](int64_t rows, int) {
      return linear_scratch(rows, weight, kernels);
    };
    program_.add({run, Division::other, {x}, {out}, linear_work(1, weight), scratch});
    return out;
  }

  int rms_norm(int x, const Floats& weight, float eps) {
    begin();
    const int width = require_width("x", x);
    require_length("weight", weight, width);
    const int out = program_.add_array(width);
    const auto run = [weight, eps, width, x, out](const Team& team, const Run& run) {
      paceline::rms_norm(team, run.at(x), weight.data(), eps, run.rows(), width, run.at(out));
    };
    program_.add({run, Division::rows, {x}, {out}, width});
    return out;
  }

  int add_rms_norm(int residual, int update, const Floats& weight, float eps) {
    begin();
    const int width = require_width("residual", residual);
    require_width("update", update, width);
    require_length("weight", weight, width);
    const int out = program_.add_array(width);
    const auto run = [weight, eps, width, residual, update, out](const Team& team, const Run& run) {
      paceline::add_rms_norm(team, run.at(residual), run.at(update), weight.data(), eps, run.rows(), width,
                             run.at(out));
    };
    program_.add({run, Division::rows, {update}, {residual, out}, width});
    return out;
  }

  void qk_norm(int qkv, const Heads& heads, const Floats& q_weight, const Floats& k_weight, float eps) {
    begin();
    const HeadShape shape = require_heads(qkv, heads);
    require_length("q_weight", q_weight, shape.head_dim);
    require_length("k_weight", k_weight, shape.head_dim);
    const auto run = [qkv, shape, q_weight, k_weight, eps](const Team& team, const Run& run) {
      paceline::qk_norm(team, run.at(qkv), shape, q_weight.data(), k_weight.data(), eps, run.rows());
    };
    program_.add({run, Division::rows, {}, {qkv}, row_width(shape)});
  }

  int layer_norm(int x, const Floats& weight, const Floats& bias, float eps) {
    begin();
    const int width = require_width("x", x);
    require_length("weight", weight, width);
    require_length("bias", bias, width);
    const int out = program_.add_array(width);
    const auto run = [weight, bias, eps, width, x, out](const Team& team, const Run& run) {
      paceline::layer_norm(team, run.at(x), weight.data(), bias.data(), eps, run.rows(), width, run.at(out));
    };
    program_.add({run, Division::rows, {x}, {out}, width});
    return out;
  }

  void rope(int qkv, const Heads& heads, const FloatRows& cos, const FloatRows& sin, bool neighbours,
            const Ints& axes) {
    begin();
    const HeadShape shape = require_heads(qkv, heads);
    const RopeTable table = rope_table(shape, cos, sin, neighbours, axes);
    num_positions_ = std::min(num_positions_, static_cast<int64_t>(cos.shape(0)));
    num_axes_ = std::max(num_axes_, num_axes(table));
    // The arrays are captured to be kept.
    const auto run = [qkv, shape, table, cos, sin, axes](const Team& team, const Run& run) {
      paceline::rope(team, run.at(qkv), shape, run.input().positions, run.input().num_axes, table, run.rows());
    };
    program_.add({run, Division::rows, {}, {qkv}, row_width(shape)});
  }

  void write_kv(int qkv, const Heads& heads, int layer) {
    begin();
    const HeadShape shape = require_heads(qkv, heads);
    const int stored = require_layer(layer, shape);
    const auto run = [qkv, shape, layer](const Team& team, const Run& run) {
      paceline::write_kv(team, run.at(qkv), shape, run.input().kv->layer(layer), run.input().kv_rows, run.rows());
    };
    program_.add({run, Division::rows, {qkv}, {stored}, row_width(shape)});
  }

  int attention(int qkv, const Heads& heads, int layer, float scale, int window, float softcap) {
    begin();
    const HeadShape shape = require_heads(qkv, heads);
    const int stored = require_layer(layer, shape);
    require(window >= 0, "window must not be negative");
    if (window_ != 0) window_ = window == 0 ? 0 : std::max(window_, window);
    const int plan = program_.plan(shape.num_q / shape.num_kv, window);
    const int out = program_.add_array(static_cast<int64_t>(shape.num_q) * shape.head_dim);
    const auto run = [qkv, shape, layer, scale, softcap, plan, out](const Team& team, const Run& run) {
      paceline::attention(team, run.plan(plan), run.at(qkv), shape, run.input().kv->layer(layer), scale, softcap,
                          run.at(out), run.scratch());
    };
    const auto scratch = [shape](int64_t, int threads) { return attention_scratch(shape, threads); };
    program_.add({run, Division::other, {qkv, stored}, {out}, row_width(shape), scratch});
    return out;
  }

  int gated_activation(int gate_up, const std::string& activation) {
    begin();
    const int width = require_width("gate_up", gate_up) / 2;
    require_width("gate_up", gate_up, 2 * static_cast<int64_t>(width));
    const int out = program_.add_array(width);
    const Function function = parse_function(activation);
    const auto run = [gate_up, function, width, out](const Team& team, const Run& run) {
      paceline::gated_activation(team, run.at(gate_up), function, run.rows(), width, run.at(out));
    };
    program_.add({run, Division::rows, {gate_up}, {out}, 4 * static_cast<int64_t>(width)});
    return out;
  }

  std::tuple<int, int> route(int logits, const RoutingRule& rule, const Floats& bias) {
    begin();
    const Routing routing = parse_routing(rule, require_width("logits", logits), bias);
    const int ids = program_.add_array(routing.top_k), weights = program_.add_array(routing.top_k);
    // The bias is captured to be kept.
    const auto run = [logits, routing, bias, ids, weights](const Team& team, const Run& run) {
      paceline::route(team, run.at(logits), routing, run.rows(), run.ids_at(ids), run.at(weights));
    };
    program_.add({run, Division::rows, {logits}, {ids, weights}, route_work(routing)});
    num_experts_[ids] = routing.num_experts;
    return {ids, weights};
  }

  int experts(int x, int ids, int weights, const Experts& packed, const std::string& activation) {
    begin();
    const paceline::Experts& experts = packed.shared;
    require_width("x", x, experts.width);
    const auto chosen = num_experts_.find(ids);
    require(
        chosen != num_experts_.end() && chosen->second <= experts.count(),
        "ids must be those that a route has chosen among no more than " + std::to_string(experts.count()) + " experts");
    const int top_k = require_width("ids", ids);
    require_width("weights", weights, top_k);
    const Function function = parse_function(activation);
    const int out = program_.add_array(experts.width);
    const auto run = [x, ids, weights, top_k, &experts, function, out](const Team& team, const Run& run) {
      paceline::run_experts(team, run.at(x), run.rows(), {run.ids_at(ids), run.at(weights), top_k}, experts, function,
                            run.at(out), run.scratch());
    };
    const auto scratch = [top_k, &experts, &kernels = cpu_.machine.kernels](int64_t rows, int) {
      return experts_scratch(rows, top_k, experts, kernels);
    };
    program_.add({run, Division::other, {x, ids, weights}, {out}, experts_work(1, top_k, experts), scratch});
    return out;
  }

  void activate(int x, const std::string& activation) {
    begin();
    const int width = require_width("x", x);
    const Function function = parse_function(activation);
    const auto run = [x, function, width](const Team& team, const Run& run) {
      paceline::activate(team, run.at(x), function, run.rows(), width);
    };
    program_.add({run, Division::rows, {}, {x}, 4 * static_cast<int64_t>(width)});
  }

  void add(int x, int update) {
    begin();
    const int width = require_width("x", x);
    require_width("update", update, width);
    const auto run = [x, update, width](const Team& team, const Run& run) {
      paceline::add(team, run.at(x), run.at(update), run.rows(), width);
    };
    program_.add({run, Division::rows, {update}, {x}, width});
  }

  void softcap(int x, float cap) {
    begin();
    require(cap > 0.0f, "cap must be above 0");
    const int width = require_width("x", x);
    const auto run = [x, cap, width](const Team& team, const Run& run) {
      paceline::softcap(team, run.at(x), cap, run.rows(), width);
    };
    program_.add({run, Division::rows, {}, {x}, 4 * static_cast<int64_t>(width)});
  }

  void finish(int result) {
    begin();
    require_width("the result", result);
    program_.finish(result);
  }

  int64_t workspace_bytes(int64_t rows) const {
    // numpy's arrays begin anywhere.
    return program_.workspace_bytes(rows, cpu_.machine.pool.size()) + kAlignment;
  }

  void run(const Ints& token_ids, const Positions& positions, const Ints& kv_rows, const Ints& span_starts,
           const Ints& context_lens, const IntRows& block_tables, const KvStore& kv, const BytesOut& workspace,
           const FloatRowsOut& out) {
    require(program_.finished(), "the program has no end yet");
    const int64_t rows = static_cast<int64_t>(token_ids.shape(0));
    require_range("token id", token_ids.data(), rows, num_tokens_);
    const int num_axes = check_positions(positions, rows, num_axes_, num_positions_);
    require_length("kv_rows", kv_rows, rows);
    require_range("store row", kv_rows.data(), rows, kv.num_rows());
    if (num_layers_ > 0) kv.require_layer(num_layers_ - 1, heads_);
    const AttentionSpans spans =
        attention_spans(span_starts, context_lens, block_tables, rows, std::max(window_, 0), kv);
    require_shape("out", out, rows, program_.width(program_.result()));
    require(static_cast<int64_t>(workspace.shape(0)) >= workspace_bytes(rows), "the workspace is too small");
    const int64_t address = reinterpret_cast<int64_t>(workspace.data());
    const Turn turn(cpu_);
    program_.run(cpu_.machine, {rows, token_ids.data(), positions.data(), num_axes, kv_rows.data(), spans, &kv},
                 workspace.data() + (align(address) - address), out.data());
  }

 private:
  void begin() const { require(!program_.finished(), "the program has ended"); }

  int require_width(const char* name, int array) const {
    if (array < 0 || array >= program_.num_arrays() || program_.width(array) == 0) {
      refuse(std::string(name) + " is no array of this program");
    }
    return static_cast<int>(program_.width(array));
  }

  void require_width(const char* name, int array, int64_t width) const {
    if (require_width(name, array) == width) return;
    refuse(std::string(name) + " must have rows of " + std::to_string(width) + " numbers, not " +
           std::to_string(program_.width(array)));
  }

  HeadShape require_heads(int qkv, const Heads& heads) const {
    const HeadShape shape = head_shape(heads);
    require_width("qkv", qkv, row_width(shape));
    return shape;
  }

  // All layers of a store have the same heads.
  int require_layer(int layer, HeadShape heads) {
    require_range("layer", &layer, 1, INT_MAX);
    require(num_layers_ == 0 || (heads.num_kv == heads_.num_kv && heads.head_dim == heads_.head_dim),
            "the heads differ from those of another layer");
    heads_ = heads;
    num_layers_ = std::max(num_layers_, layer + 1);
    return program_.layer(layer);
  }

  Cpu& cpu_;
  paceline::Program program_;
  std::map<int, int> num_experts_;  // among which the ids of an array were chosen
  // What a batch must fit.
  int64_t num_tokens_ = INT_MAX, num_positions_ = INT_MAX;
  int num_axes_ = 1;
  int num_layers_ = 0;
  HeadShape heads_{};
  int window_ = -1;  // the widest one (0: everything), or -1 without attention
};

}  // namespace

void bind_program(nb::module_& m) {
  using P = BoundProgram;
  nb::class_<P>(m, "Program")
      .def(nb::init<Cpu&>(), nb::arg("cpu"), nb::keep_alive<1, 2>())
      .def("embed", &P::embed, nb::arg("table"), nb::arg("scale"), nb::keep_alive<1, 2>())
      .def("linear", &P::linear, nb::arg("x"), nb::arg("weight"), nb::keep_alive<1, 3>())
      .def("rms_norm", &P::rms_norm, nb::arg("x"), nb::arg("weight").noconvert(), nb::arg("eps"))
      .def("add_rms_norm", &P::add_rms_norm, nb::arg("residual"), nb::arg("update"), nb::arg("weight").noconvert(),
           nb::arg("eps"))
      .def("qk_norm", &P::qk_norm, nb::arg("qkv"), nb::arg("heads"), nb::arg("q_weight").noconvert(),
           nb::arg("k_weight").noconvert(), nb::arg("eps"))
      .def("rope", &P::rope, nb::arg("qkv"), nb::arg("heads"), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
           nb::arg("neighbours"), nb::arg("axes").noconvert())
      .def("layer_norm", &P::layer_norm, nb::arg("x"), nb::arg("weight").noconvert(), nb::arg("bias").noconvert(),
           nb::arg("eps"))
      .def("write_kv", &P::write_kv, nb::arg("qkv"), nb::arg("heads"), nb::arg("layer"))
      .def("attention", &P::attention, nb::arg("qkv"), nb::arg("heads"), nb::arg("layer"), nb::arg("scale"),
           nb::arg("window"), nb::arg("softcap"))
      .def("gated_activation", &P::gated_activation, nb::arg("gate_up"), nb::arg("activation"))
      .def("route", &P::route, nb::arg("logits"), nb::arg("rule"), nb::arg("bias").noconvert())
      .def("experts", &P::experts, nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("experts"),
           nb::arg("activation"), nb::keep_alive<1, 5>())
      .def("activate", &P::activate, nb::arg("x"), nb::arg("activation"))
      .def("add", &P::add, nb::arg("x"), nb::arg("update"))
      .def("softcap", &P::softcap, nb::arg("x"), nb::arg("cap"))
      .def("finish", &P::finish, nb::arg("result"))
      .def("workspace_bytes", &P::workspace_bytes, nb::arg("rows"))
      .def("run", &P::run, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
           nb::arg("kv_rows").noconvert(), nb::arg("span_starts").noconvert(), nb::arg("context_lens").noconvert(),
           nb::arg("block_tables").noconvert(), nb::arg("kv"), nb::arg("workspace").noconvert(),
           nb::arg("out").noconvert());
}

}  // namespace paceline::bindings
