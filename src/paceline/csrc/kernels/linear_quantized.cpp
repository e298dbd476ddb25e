// Linear layers with int8 and int4 weights in groups of 32, and the activations that go with them.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

// A row's numbers in a group are kept as 15-bit integers, written with two digits of base 128: q = 128 * high + low.
// One digit, plain int8, would cost half the work and make the activations' rounding the largest error of the whole
// model.
constexpr int kDigits = 2;
constexpr float kBase = 128.0f;
constexpr float kLargestQuant = 127.0f * kBase;

template <int R>
struct Record {
  int8_t quants[kDigits][R][kGroup];
  float scales[R];
  float scaled_sums[R];
  int32_t sums[kDigits][R];
};

// One row's group: scale = largest magnitude / 16256, quants rounded to nearest even. A group with an infinity or a NaN
// gets a NaN scale, so that it spoils its own row and no other; one below 2^-100 counts as zero.
template <int R>
void quantize_group(const float* x, int count, int r, Record<R>& record) {
  const F32x16 a = load_first(x, count < kLanes ? count : kLanes);
  const F32x16 b = count > kLanes ? load_first(x + kLanes, count - kLanes) : zero();
  const int32_t largest_bits = reduce_max(max(as_i32(absolute(a)), as_i32(absolute(b))));  // as integers NaN is largest
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  if (largest_bits >= 0x7f800000 || largest < 0x1p-100f) {
    for (int d = 0; d < kDigits; ++d) {
      for (int i = 0; i < kGroup; ++i) record.quants[d][r][i] = 0;
      record.sums[d][r] = 0;
    }
    record.scales[r] = record.scaled_sums[r] = largest_bits >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    return;
  }
  const F32x16 inverse = broadcast(kLargestQuant / largest);
  int32_t sums[kDigits] = {0, 0};
  for (int half = 0; half < 2; ++half) {
    const F32x16 q = to_f32(round_to_i32(mul(half == 0 ? a : b, inverse)));
    const I32x16 high = round_to_i32(mul(q, broadcast(1.0f / kBase)));
    const I32x16 low = round_to_i32(fma(to_f32(high), broadcast(-kBase), q));
    store_i8(record.quants[0][r] + half * kLanes, high);
    store_i8(record.quants[1][r] + half * kLanes, low);
    sums[0] += reduce_add(high);
    sums[1] += reduce_add(low);
  }
  record.scales[r] = largest / kLargestQuant;
  record.scaled_sums[r] = record.scales[r] * static_cast<float>(static_cast<int32_t>(kBase) * sums[0] + sums[1]);
  for (int d = 0; d < kDigits; ++d) record.sums[d][r] = sums[d];
}

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

// The exact dots of a group's 16 outputs with one digit of R rows.
struct Int8 {
  using Group = Int8Group;
  static constexpr bool kHasMinima = false;
  template <int R>
  static inline void dots(const Group& w, const int8_t (&x)[R][kGroup], const int32_t (&sums)[R], F32x16 (&dot)[R]) {
    SignedSum sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r].start(sums[r]);
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const SignedWeights weights(load_bytes(w.quants[s]));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r].add_product(weights, broadcast_word(x[r] + 4 * s));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) dot[r] = to_f32(sum[r].total());
  }
};

struct Int4 {
  using Group = Int4Group;
  static constexpr bool kHasMinima = true;
  template <int R>
  static inline void dots(const Group& w, const int8_t (&x)[R][kGroup], const int32_t (&)[R], F32x16 (&dot)[R]) {
    NibbleSum sum[R];
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const Bytes64 both = load_bytes(w.quants[s]);
      const Bytes64 low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r].add_product(low, broadcast_word(x[r] + 4 * s));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r].add_product(high, broadcast_word(x[r] + 4 * s + 16));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) dot[r] = to_f32(sum[r].total());
  }
};

// For each output: for g ascending, acc = fma(dot, weight scale * row scale, acc), where dot = fma(high digits' dot,
// 128, low digits' dot); with minima then acc = fma(weight minimum, row scale * sum of the row's quants, acc).
template <class Form, int R>
inline void add_group(const typename Form::Group& w, const Record<R>& x, F32x16 (&acc)[R]) {
  F32x16 high[R], low[R];
  Form::template dots<R>(w, x.quants[0], x.sums[0], high);
  Form::template dots<R>(w, x.quants[1], x.sums[1], low);
  const F32x16 scale = load_f16(w.scales);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F32x16 dot = fma(high[r], broadcast(kBase), low[r]);
    acc[r] = fma(dot, mul(scale, broadcast(x.scales[r])), acc[r]);
  }
  if constexpr (Form::kHasMinima) {
    const F32x16 minimum = load_f16(w.minima);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = fma(minimum, broadcast(x.scaled_sums[r]), acc[r]);
  }
}

template <class Form, int R>
void linear_rows(const uint8_t* block, int groups, const PanelRange& range) {
  const Record<R>* x = reinterpret_cast<const Record<R>*>(block);
  for (int panel = 0; panel < range.panels; ++panel) {
    const auto* w = reinterpret_cast<const typename Form::Group*>(static_cast<const char*>(range.weights) +
                                                                  panel * range.panel_bytes);
    F32x16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int g = 0; g < groups; ++g) add_group<Form, R>(w[g], x[g], acc);
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

template <int R>
void quantize(const float* x, int64_t stride, int rows, int inputs, uint8_t* block) {
  static_assert(sizeof(Record<R>) == R * kQuantizedRecord);
  if (rows == R) {
    Record<R>* records = reinterpret_cast<Record<R>*>(block);
    for (int first = 0; first < inputs; first += kGroup) {
      const int count = inputs - first < kGroup ? inputs - first : kGroup;
      for (int r = 0; r < R; ++r) quantize_group(x + r * stride + first, count, r, records[first / kGroup]);
    }
  } else if constexpr (R > 1) {
    quantize<R - 1>(x, stride, rows, inputs, block);
  }
}

}  // namespace

void quantize_rows(const float* x, int64_t stride, int rows, int inputs, uint8_t* block) {
  quantize<kQuantizedRows>(x, stride, rows, inputs, block);
}

void linear_int8(const uint8_t* block, int rows, int groups, const PanelRange& range) {
  linear<Int8, kQuantizedRows>(block, rows, groups, range);
}

void linear_int4(const uint8_t* block, int rows, int groups, const PanelRange& range) {
  linear<Int4, kQuantizedRows>(block, rows, groups, range);
}

}  // namespace paceline::PACELINE_LEVEL
