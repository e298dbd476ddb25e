#include "program.h"

#include <algorithm>

namespace paceline {
namespace {

constexpr int64_t kAlignedNumbers = kAlignment / static_cast<int64_t>(sizeof(float));

}  // namespace

int Program::add_array(int64_t width) {
  arrays_.push_back({width});
  return static_cast<int>(arrays_.size()) - 1;
}

int Program::layer(int index) {
  const auto known = layers_.find(index);
  return known != layers_.end() ? known->second : layers_[index] = add_array(0);
}

int Program::plan(int group, int window) {
  for (size_t i = 0; i < plans_.size(); ++i) {
    if (plans_[i].group == group && plans_[i].window == window) return static_cast<int>(i);
  }
  plans_.push_back({group, window});
  return static_cast<int>(plans_.size()) - 1;
}

void Program::finish(int result) {
  result_ = result;
  // Scratch memory is one for all: whoever uses it must not meet those who still do.
  const int scratch = add_array(0);
  for (Operation& operation : operations_) {
    if (operation.scratch) operation.writes.push_back(scratch);
  }
  assign_slots();
  place_barriers();
}

void Program::assign_slots() {
  for (size_t i = 0; i < operations_.size(); ++i) {
    for (const std::vector<int>* list : {&operations_[i].reads, &operations_[i].writes}) {
      for (const int array : *list) arrays_[array].last_use = static_cast<int>(i);
    }
  }
  std::vector<int> free;
  const auto place = [&](int number) {
    Array& array = arrays_[number];
    if (array.slot >= 0) return;
    const bool lasting = array.width == 0 || number == result_;
    const auto found = std::find_if(free.begin(), free.end(), [&](int s) { return slots_[s].width == array.width; });
    if (!lasting && found != free.end()) {
      array.slot = *found;
      free.erase(found);
      return;
    }
    array.slot = static_cast<int>(slots_.size());
    slots_.push_back({array.width, row_numbers_});
    if (!lasting) row_numbers_ += (array.width + kAlignedNumbers - 1) / kAlignedNumbers * kAlignedNumbers;
  };
  for (size_t i = 0; i < operations_.size(); ++i) {
    std::vector<int> used = operations_[i].reads;
    used.insert(used.end(), operations_[i].writes.begin(), operations_[i].writes.end());
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    std::for_each(used.begin(), used.end(), place);
    for (const int number : used) {
      const Array& array = arrays_[number];
      if (array.last_use == static_cast<int>(i) && array.width > 0 && number != result_) free.push_back(array.slot);
    }
  }
}

void Program::place_barriers() {
  struct Access {
    int slot;
    bool writes;
    Division division;
  };
  std::vector<Access> before;  // since the last barrier
  for (Operation& operation : operations_) {
    std::vector<Access> now;
    for (const int array : operation.reads) now.push_back({arrays_[array].slot, false, operation.division});
    for (const int array : operation.writes) now.push_back({arrays_[array].slot, true, operation.division});
    operation.after_barrier = std::any_of(now.begin(), now.end(), [&](const Access& a) {
      return std::any_of(before.begin(), before.end(), [&](const Access& b) {
        const bool by_row = a.division == Division::rows && b.division == Division::rows;
        return a.slot == b.slot && (a.writes || b.writes) && !by_row;
      });
    });
    if (operation.after_barrier) before.clear();
    before.insert(before.end(), now.begin(), now.end());
  }
}

int64_t Program::scratch_bytes(int64_t rows, int threads) const {
  int64_t bytes = 0;
  for (const Operation& operation : operations_) {
    if (operation.scratch) bytes = std::max(bytes, operation.scratch(rows, threads));
  }
  return align(bytes);
}

int64_t Program::workspace_bytes(int64_t rows, int threads) const {
  return scratch_bytes(rows, threads) + rows * row_numbers_ * static_cast<int64_t>(sizeof(float));
}

void Program::run(Machine& machine, const ProgramInput& input, uint8_t* workspace, float* out) const {
  if (input.rows == 0) return;
  const int64_t scratch = scratch_bytes(input.rows, machine.pool.size());
  const Run run(*this, input, workspace, reinterpret_cast<float*>(workspace + scratch), out);
  int64_t work = 0;
  for (const Operation& operation : operations_) work += operation.work;
  machine.run(work * input.rows, 0, [&](const Team& team, uint8_t*) {
    for (const Operation& operation : operations_) {
      if (operation.after_barrier) team.barrier();
      operation.run(team, run);
    }
  });
}

Program::Run::Run(const Program& program, const ProgramInput& input, uint8_t* scratch, float* numbers, float* out)
    : program_(program), input_(input), scratch_(scratch), numbers_(numbers), out_(out) {
  for (const PlanKey& key : program.plans_) plans_.push_back(plan_attention(input.spans, key.group, key.window));
}

}  // namespace paceline
