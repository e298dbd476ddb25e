// What the bindings share: Python's arrays and how they are checked, and the objects that Python holds.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <string>
#include <tuple>

#include "attention.h"
#include "checks.h"
#include "encodings.h"
#include "experts.h"
#include "kv_store.h"
#include "team.h"

namespace paceline::bindings {

namespace nb = nanobind;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float, 1>;
using FloatRows = Array<const float, 2>;
using FloatRowsOut = Array<float, 2>;
using Ints = Array<const int32_t, 1>;
using IntRows = Array<const int32_t, 2>;
using Bytes = Array<const uint8_t, 1>;
using BytesOut = Array<uint8_t, 1>;
using IntsOut = Array<int32_t, 1>;
using FloatsOut = Array<float, 1>;
using IntRowsOut = Array<int32_t, 2>;
using Positions = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;  // [rows] or [rows, axes]

template <class A>
void require_shape(const char* name, const A& array, int64_t rows, int64_t columns) {
  if (static_cast<int64_t>(array.shape(0)) == rows && static_cast<int64_t>(array.shape(1)) == columns) return;
  refuse(std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "], not [" +
         std::to_string(array.shape(0)) + ", " + std::to_string(array.shape(1)) + "]");
}

template <class A>
void require_length(const char* name, const A& array, int64_t length) {
  if (static_cast<int64_t>(array.shape(0)) == length) return;
  refuse(std::string(name) + " must have " + std::to_string(length) + " entries, not " +
         std::to_string(array.shape(0)));
}

struct Embedding {
  Encoding encoding;
  int64_t rows;
  int width;
  Bytes table;  // keeps the file's memory map alive
};

// Experts with the matrices that they are made of, kept alive. Throws std::invalid_argument for matrices that do not
// fit together.
struct Experts {
  nb::list gate_up, down;
  paceline::Experts shared;

  Experts(nb::list gate_ups, nb::list downs);
};

// The threads, the level and the scratch memory; one operation runs at a time.
struct Cpu {
  Machine machine;
  std::mutex turn;

  Cpu(int num_threads, const std::string& isa);
};

// Held while an operation runs: no interpreter lock, and the machine for oneself.
class Turn {
 public:
  explicit Turn(Cpu& cpu) : lock_(cpu.turn) {}

 private:
  nb::gil_scoped_release release_;
  std::lock_guard<std::mutex> lock_;
};

// An operation that shares its rows: a single one wakes nobody.
template <class F>
void run_rows(Cpu& cpu, int64_t rows, int64_t width, int64_t scratch_bytes, const F& operation) {
  cpu.machine.run(rows < 2 ? 0 : rows * width, scratch_bytes, operation);
}
template <class F>
void run_rows(Cpu& cpu, int64_t rows, int64_t width, const F& operation) {
  run_rows(cpu, rows, width, 0, [&](const Team& team, uint8_t*) { operation(team); });
}

// (query heads, key heads, head size)
using Heads = std::tuple<int, int, int>;
HeadShape head_shape(const Heads& heads);

// (experts chosen, scoring, renormalised, scale, groups, groups chosen)
using RoutingRule = std::tuple<int, std::string, bool, float, int, int>;
// `bias` is empty or has a number for each expert. Throws std::invalid_argument for a rule that so many experts cannot
// follow.
Routing parse_routing(const RoutingRule& rule, int64_t num_experts, const Floats& bias);

Function parse_function(const std::string& name);

// `axes` is empty where all pairs turn by the first position. Throws std::invalid_argument for a table that does not
// fit the heads.
RopeTable rope_table(HeadShape heads, const FloatRows& cos, const FloatRows& sin, bool neighbours, const Ints& axes);
// How many positions a token needs for the table.
int num_axes(const RopeTable& table);
// How many positions each of so many rows has: `needed` at least, all of them below the limit.
int check_positions(const Positions& positions, int64_t rows, int needed, int64_t limit);

// The spans of a batch of so many rows. Throws std::invalid_argument for spans that do not cover the rows, and for
// blocks that are missing or not in the store among those that a window (0: everything) needs.
AttentionSpans attention_spans(const Ints& span_starts, const Ints& context_lens, const IntRows& block_tables,
                               int64_t rows, int window, const KvStore& store);

void bind_layers(nb::class_<Cpu>& cpu);
void bind_choice(nb::class_<Cpu>& cpu);
void bind_program(nb::module_& m);

}  // namespace paceline::bindings
