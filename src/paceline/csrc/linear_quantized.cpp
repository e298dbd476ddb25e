// Linear layers with int8 and int4 weights in groups of 32, and the activations that go with them.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

// One row's group: scale = largest magnitude / 127, quants rounded to nearest even. A group with an infinity or a NaN
// gets a NaN scale, so that it spoils its own row and no other; one below 2^-100 counts as zero.
void quantize_group(const float* x, int count, int8_t* quants, float& scale, float& scaled_sum, int32_t& sum) {
  const F32x16 a = load_first(x, count < kLanes ? count : kLanes);
  const F32x16 b = count > kLanes ? load_first(x + kLanes, count - kLanes) : zero();
  const int32_t largest_bits = reduce_max(max(as_i32(absolute(a)), as_i32(absolute(b))));  // as integers NaN is largest
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  if (largest_bits >= 0x7f800000 || largest < 0x1p-100f) {
    for (int i = 0; i < kGroup; ++i) quants[i] = 0;
    scale = scaled_sum = largest_bits >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    sum = 0;
    return;
  }
  const F32x16 inverse = broadcast(127.0f / largest);
  const I32x16 qa = round_to_i32(mul(a, inverse)), qb = round_to_i32(mul(b, inverse));
  store_i8(quants, qa);
  store_i8(quants + kLanes, qb);
  sum = reduce_add(add(qa, qb));
  scale = largest / 127.0f;
  scaled_sum = scale * static_cast<float>(sum);
}

template <int R>
struct Record {
  int8_t quants[R][kGroup];
  float scales[R];
  float scaled_sums[R];
  int32_t sums[R];
};

template <int R>
inline void finish(const PanelRange& range, int panel, const F32x16 (&acc)[R]) {
  const int column = panel * kPanel;
  const int left = range.outputs - column;
  for (int r = 0; r < R; ++r) {
    const F32x16 y = range.bias ? add(acc[r], load(range.bias + column)) : acc[r];
    float* out = range.out + r * range.out_stride + column;
    if (left >= kPanel) {
      store(out, y);
    } else {
      store_first(out, y, left);
    }
  }
}

// For each output: for g ascending, acc = fma(dot, weight scale * row scale, acc), dot being exact.
struct Int8 {
  using Group = Int8Group;
  template <int R>
  static inline void add_group(const Group& w, const Record<R>& x, F32x16 (&acc)[R]) {
    SignedSum dot[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) dot[r].start(x.sums[r]);
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const SignedWeights weights(load_bytes(w.quants[s]));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) dot[r].add_product(weights, broadcast_word(x.quants[r] + 4 * s));
    }
    const F32x16 scale = load_f16(w.scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = fma(to_f32(dot[r].total()), mul(scale, broadcast(x.scales[r])), acc[r]);
  }
};

// The same, and then acc = fma(weight minimum, row scale * sum of the row's quants, acc).
struct Int4 {
  using Group = Int4Group;
  template <int R>
  static inline void add_group(const Group& w, const Record<R>& x, F32x16 (&acc)[R]) {
    NibbleSum dot[R];
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const Bytes64 both = load_bytes(w.quants[s]);
      const Bytes64 low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) dot[r].add_product(low, broadcast_word(x.quants[r] + 4 * s));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) dot[r].add_product(high, broadcast_word(x.quants[r] + 4 * s + 16));
    }
    const F32x16 scale = load_f16(w.scales), minimum = load_f16(w.minima);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      acc[r] = fma(to_f32(dot[r].total()), mul(scale, broadcast(x.scales[r])), acc[r]);
      acc[r] = fma(minimum, broadcast(x.scaled_sums[r]), acc[r]);
    }
  }
};

template <class Form, int R>
void linear_rows(const uint8_t* block, int groups, const PanelRange& range) {
  const Record<R>* x = reinterpret_cast<const Record<R>*>(block);
  for (int panel = 0; panel < range.panels; ++panel) {
    const auto* w = reinterpret_cast<const typename Form::Group*>(static_cast<const char*>(range.weights) +
                                                                  panel * range.panel_bytes);
    F32x16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int g = 0; g < groups; ++g) Form::template add_group<R>(w[g], x[g], acc);
    finish<R>(range, panel, acc);
  }
}

template <class Form, int R>
void linear(const uint8_t* block, int rows, int groups, const PanelRange& range) {
  if (rows == R) {
    linear_rows<Form, R>(block, groups, range);
  } else if constexpr (R > 1) {
    linear<Form, R - 1>(block, rows, groups, range);
  }
}

}  // namespace

void quantize_rows(const float* x, int64_t stride, int rows, int inputs, uint8_t* block) {
  const int groups = (inputs + kGroup - 1) / kGroup;
  for (int g = 0; g < groups; ++g) {
    uint8_t* record = block + static_cast<int64_t>(g) * rows * kQuantizedRecord;
    float* scales = reinterpret_cast<float*>(record + rows * kGroup);
    float* scaled_sums = scales + rows;
    int32_t* sums = reinterpret_cast<int32_t*>(scaled_sums + rows);
    const int count = inputs - g * kGroup < kGroup ? inputs - g * kGroup : kGroup;
    for (int r = 0; r < rows; ++r) {
      quantize_group(x + r * stride + g * kGroup, count, reinterpret_cast<int8_t*>(record) + r * kGroup, scales[r],
                     scaled_sums[r], sums[r]);
    }
  }
}

void linear_int8(const uint8_t* block, int rows, int groups, const PanelRange& range) {
  linear<Int8, kQuantizedRows>(block, rows, groups, range);
}

void linear_int4(const uint8_t* block, int rows, int groups, const PanelRange& range) {
  linear<Int4, kQuantizedRows>(block, rows, groups, range);
}

}  // namespace paceline::PACELINE_LEVEL
