// Layers of experts over whole arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "pack.h"
#include "team.h"

namespace paceline {

// Each expert's two linear layers: [width] -> [2 * hidden] -> gated activation -> [width]. They belong to others.
struct Experts {
  int width, hidden;
  std::vector<const PackedLinear*> gate_up, down;
  int count() const { return static_cast<int>(gate_up.size()); }
  std::vector<const PackedLinear*> all() const {
    std::vector<const PackedLinear*> both = gate_up;
    both.insert(both.end(), down.begin(), down.end());
    return both;
  }
};

// The experts of each row, all of them in range, and what their results count: both [rows][top_k].
struct ExpertChoice {
  const int32_t* ids;
  const float* weights;
  int top_k;
};

// [rows, width] -> [rows, width]. The rows of an expert go through its layers together.
void run_experts(const Team& team, const float* x, int64_t rows, const ExpertChoice& choice, const Experts& experts,
                 Function function, float* out, uint8_t* scratch);
int64_t experts_scratch(int64_t rows, int top_k, const Experts& experts, const Kernels& kernels);

inline int64_t experts_work(int64_t rows, int top_k, const Experts& experts) {
  return rows * top_k * 3 * experts.width * static_cast<int64_t>(experts.hidden) / 8;
}

}  // namespace paceline
