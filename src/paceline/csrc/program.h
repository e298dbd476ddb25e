// A forward pass as a list of operations: written down once, run for every batch by all threads together without going
// back to Python in between.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "attention.h"
#include "kv_store.h"
#include "team.h"

namespace paceline {

// The batch of one run. Everything in it has been checked by the caller.
struct ProgramInput {
  int64_t rows;
  const int32_t *token_ids, *positions;
  int num_axes;  // positions of a row
  const int32_t* kv_rows;
  AttentionSpans spans;
  const KvStore* kv;
};

class Program {
 public:
  class Run;

  // How an operation divides its work: by team.share(rows), so that what it does to a row is done by the thread that
  // did what others of this kind did to the same row; or in any other way.
  enum class Division { rows, other };

  struct Operation {
    std::function<void(const Team&, const Run&)> run;
    Division division;
    std::vector<int> reads, writes;  // arrays; one that is changed in place is written
    int64_t work = 0;                // for each row, as Machine::run counts it
    std::function<int64_t(int64_t rows, int threads)> scratch = nullptr;  // bytes; null: none
    bool after_barrier = false;                                           // set by finish
  };

  // A new array of `width` numbers, 4 bytes each, for every row of the batch.
  int add_array(int64_t width);
  int num_arrays() const { return static_cast<int>(arrays_.size()); }
  int64_t width(int array) const { return arrays_[array].width; }

  // The number that stands for a layer of the store where operations say what they read and write.
  int layer(int index);

  // The number of the plan for attention of this kind.
  int plan(int group, int window);

  void add(Operation operation) { operations_.push_back(std::move(operation)); }

  // No operation is added after this. Arrays share memory where their lives do not overlap, and barriers are put where
  // a thread reads or overwrites what another one wrote or read.
  void finish(int result);

  int result() const { return result_; }
  bool finished() const { return result_ >= 0; }

  int64_t workspace_bytes(int64_t rows, int threads) const;

  // Fills `out`, the array that finish was given. The workspace is aligned to kAlignment.
  void run(Machine& machine, const ProgramInput& input, uint8_t* workspace, float* out) const;

 private:
  struct Array {
    int64_t width;  // 0 for what lies outside the workspace
    int slot = -1;
    int last_use = -1;
  };
  // A place in the workspace for arrays of one width, one after the other.
  struct Slot {
    int64_t width, offset;  // in numbers for each row
  };
  struct PlanKey {
    int group, window;
  };

  void assign_slots();
  void place_barriers();
  int64_t scratch_bytes(int64_t rows, int threads) const;

  std::vector<Operation> operations_;
  std::vector<Array> arrays_;
  std::map<int, int> layers_;  // their arrays
  std::vector<PlanKey> plans_;
  std::vector<Slot> slots_;
  int64_t row_numbers_ = 0;
  int result_ = -1;
};

// What operations see of a run.
class Program::Run {
 public:
  Run(const Program& program, const ProgramInput& input, uint8_t* scratch, float* numbers, float* out);

  const ProgramInput& input() const { return input_; }
  int64_t rows() const { return input_.rows; }
  uint8_t* scratch() const { return scratch_; }
  const AttentionPlan& plan(int number) const { return plans_[number]; }
  float* at(int array) const {
    if (array == program_.result_) return out_;
    return numbers_ + input_.rows * program_.slots_[program_.arrays_[array].slot].offset;
  }
  int32_t* ids_at(int array) const { return reinterpret_cast<int32_t*>(at(array)); }

 private:
  const Program& program_;
  const ProgramInput& input_;
  uint8_t* scratch_;
  float *numbers_, *out_;
  std::vector<AttentionPlan> plans_;
};

}  // namespace paceline
