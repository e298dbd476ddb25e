// Linear layers with weights kept in the file's own precision: float32, float16, bfloat16.
//
// For each output: for k ascending, acc = fma(weight, x, acc), in float32. Weights of a panel lie as [K][16], those of
// bfloat16 as [K / 2][16][2], which one load and one shift or mask turn into two vectors.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

// Each format reads the weights of two neighbouring inputs, and of a last single one.
struct Float32 {
  using Number = float;
  static inline void pair(const float* p, F32x16& a, F32x16& b) {
    a = load(p);
    b = load(p + kPanel);
  }
  static inline F32x16 single(const float* p) { return load(p); }
};
struct Float16 {
  using Number = uint16_t;
  static inline void pair(const uint16_t* p, F32x16& a, F32x16& b) {
    a = load_f16(p);
    b = load_f16(p + kPanel);
  }
  static inline F32x16 single(const uint16_t* p) { return load_f16(p); }
};
struct BFloat16 {
  using Number = uint16_t;
  static inline void pair(const uint16_t* p, F32x16& a, F32x16& b) { load_bf16_pairs(p, a, b); }
  static inline F32x16 single(const uint16_t* p) {
    F32x16 a, b;
    load_bf16_pairs(p, a, b);
    return a;
  }
};

// R rows times P panels: R * P chains side by side.
template <class Format, int R, int P>
inline void multiply(const float* x, int64_t stride, int inputs, const PanelRange& range, int first_panel) {
  const typename Format::Number* w[P];
  for (int p = 0; p < P; ++p) {
    w[p] = reinterpret_cast<const typename Format::Number*>(static_cast<const char*>(range.weights) +
                                                            (first_panel + p) * range.panel_bytes);
  }
  F32x16 acc[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) acc[r][p] = zero();
  }
  int k = 0;
  for (; k + 2 <= inputs; k += 2) {
    F32x16 a[P], b[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) Format::pair(w[p] + k * kPanel, a[p], b[p]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 xa = broadcast(x[r * stride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = fma(a[p], xa, acc[r][p]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 xb = broadcast(x[r * stride + k + 1]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = fma(b[p], xb, acc[r][p]);
    }
  }
  if (k < inputs) {
    for (int p = 0; p < P; ++p) {
      const F32x16 a = Format::single(w[p] + k * kPanel);
      for (int r = 0; r < R; ++r) acc[r][p] = fma(a, broadcast(x[r * stride + k]), acc[r][p]);
    }
  }
  for (int p = 0; p < P; ++p) {
    const int column = (first_panel + p) * kPanel;
    const int left = range.outputs - column < kPanel ? range.outputs - column : kPanel;
    for (int r = 0; r < R; ++r) {
      const F32x16 y = range.bias ? add(acc[r][p], load(range.bias + column)) : acc[r][p];
      store_first(range.out + r * range.out_stride + column, y, left);
    }
  }
}

// Few rows leave registers for more panels, whose chains hide each other's latency.
template <class Format, int R>
void multiply_rows(const float* x, int64_t stride, int inputs, const PanelRange& range) {
  constexpr int kWide = R <= kDenseRows / 4 || R == 1 ? 4 : 2;
  int panel = 0;
  for (; panel + kWide <= range.panels; panel += kWide) multiply<Format, R, kWide>(x, stride, inputs, range, panel);
  for (; panel < range.panels; ++panel) multiply<Format, R, 1>(x, stride, inputs, range, panel);
}

template <class Format, int R>
void choose_rows(const float* x, int64_t stride, int rows, int inputs, const PanelRange& range) {
  if (rows == R) {
    multiply_rows<Format, R>(x, stride, inputs, range);
  } else if constexpr (R > 1) {
    choose_rows<Format, R - 1>(x, stride, rows, inputs, range);
  }
}

}  // namespace

void linear_dense(DenseType type, const float* x, int64_t stride, int rows, int inputs, const PanelRange& range) {
  switch (type) {
    case DenseType::f32:
      return choose_rows<Float32, kDenseRows>(x, stride, rows, inputs, range);
    case DenseType::f16:
      return choose_rows<Float16, kDenseRows>(x, stride, rows, inputs, range);
    case DenseType::bf16:
      return choose_rows<BFloat16, kDenseRows>(x, stride, rows, inputs, range);
  }
}

}  // namespace paceline::PACELINE_LEVEL
