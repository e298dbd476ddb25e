// The end of every linear layer that keeps its sums in memory.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {

// A panel's sums of so many rows, `stride` numbers apart, with the bias, go to where they belong.
inline void store_panel(const float* sums, int64_t stride, int rows, const PanelRange& range, int panel) {
  const int column = panel * kPanel;
  const int left = range.outputs - column < kPanel ? range.outputs - column : kPanel;
  for (int r = 0; r < rows; ++r) {
    F32x16 y = load(sums + r * stride);
    if (range.bias) y = add(y, load(range.bias + column));
    store_first(range.out + r * range.out_stride + column, y, left);
  }
}

}  // namespace paceline::PACELINE_LEVEL
