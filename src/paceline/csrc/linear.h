// Linear layers over whole arrays.
#pragma once
#include <cstdint>

#include "pack.h"
#include "team.h"

namespace paceline {

// [rows, inputs] -> [rows, outputs], outputs shared.
void linear(const Team& team, const float* x, int64_t rows, const PackedLinear& weight, float* out, uint8_t* scratch);
int64_t linear_scratch(int64_t rows, const PackedLinear& weight);

// Several multiply-adds take as long as one element of the other operations.
inline int64_t linear_work(int64_t rows, const PackedLinear& weight) {
  return rows * weight.inputs * static_cast<int64_t>(weight.outputs) / 8;
}

}  // namespace paceline
