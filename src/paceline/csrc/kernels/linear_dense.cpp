// Linear layers with weights kept in the file's own precision: float32, float16, bfloat16.
//
// The product of products.h; the bias is added last. Activations are floats, or, for bfloat16 weights where the
// processor has a dot for them, rounded to bfloat16.
#include "level_kernels.h"
#include "products.h"

namespace paceline::PACELINE_LEVEL {
namespace {

template <class Format, int R, int P, class Input>
inline void multiply(const Input* x, int64_t stride, int inputs, const PanelRange& range, int first_panel) {
  const typename Format::Number* w[P];
  for (int p = 0; p < P; ++p) {
    w[p] = reinterpret_cast<const typename Format::Number*>(static_cast<const char*>(range.weights) +
                                                            (first_panel + p) * range.panel_bytes);
  }
  F32x16 acc[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) acc[r][p] = zero();
  }
  add_products<Format>(w, x, stride, inputs, acc);
  for (int p = 0; p < P; ++p) {
    const int column = (first_panel + p) * kPanel;
    const int left = range.outputs - column < kPanel ? range.outputs - column : kPanel;
    for (int r = 0; r < R; ++r) {
      const F32x16 y = range.bias ? add(acc[r][p], load(range.bias + column)) : acc[r][p];
      store_first(range.out + r * range.out_stride + column, y, left);
    }
  }
}

template <class Format, int R, class Input>
void multiply_rows(const Input* x, int64_t stride, int inputs, const PanelRange& range) {
  constexpr int P = panels_at_once(R);
  int panel = 0;
  for (; panel + P <= range.panels; panel += P) multiply<Format, R, P>(x, stride, inputs, range, panel);
  for (; panel < range.panels; ++panel) multiply<Format, R, 1>(x, stride, inputs, range, panel);
}

template <class Format, int R, class Input>
void choose_rows(const Input* x, int64_t stride, int rows, int inputs, const PanelRange& range) {
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

#if defined(__AVX512BF16__)

void round_row(const float* x, int inputs, uint16_t* out) {
  int i = 0;
  for (; i + kLanes <= inputs; i += kLanes) store_bf16(out + i, load(x + i));
  if (i < inputs) {
    uint16_t last[kLanes];
    store_bf16(last, load_first(x + i, inputs - i));
    for (int j = i; j < (inputs + 1) / 2 * 2; ++j) out[j] = last[j - i];
  }
}

#endif

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
void linear_bf16(const uint16_t* x, int64_t stride, int rows, int inputs, const PanelRange& range) {
  choose_rows<BFloat16, kDenseRows>(x, stride, rows, inputs, range);
}
#endif

}  // namespace paceline::PACELINE_LEVEL
