// The product that dense linear layers and attention are made of: rows of floats times panels of 16 outputs, which lie
// in the lanes, so that no sum ever runs over lanes.
//
// For each row and output: for k ascending, acc = fma(panel[k], x[k], acc), in float32. Panels of float32 and float16
// lie as [K][16], those of bfloat16 as [K / 2][16][2], which one load and one shift or mask turn into two vectors.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {

// Each format reads two neighbouring inputs of a panel, or the first of them.
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

// How many panels R rows go through at once: as many sums as there is room for, whose chains hide each other's latency.
constexpr int panels_at_once(int rows) { return kSums / rows >= 4 ? 4 : kSums / rows >= 2 ? 2 : 1; }

// acc[r][p] over k = 0 .. count - 1; row r reads x[r * stride + k]. What comes after the
// panels is asked for: the next panels, the values of these keys, or the next head's keys.
template <class Format, int R, int P>
inline void add_products(const typename Format::Number* const (&panels)[P], const float* x, int64_t stride, int count,
                         F32x16 (&acc)[R][P]) {
  int k = 0;
  for (; k + 2 <= count; k += 2) {
    F32x16 a[P], b[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      prefetch<2 * kPanel * sizeof(typename Format::Number)>(panels[p] + k * kPanel);
      Format::pair(panels[p] + k * kPanel, a[p], b[p]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 even = broadcast(x[r * stride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = fma(a[p], even, acc[r][p]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 odd = broadcast(x[r * stride + k + 1]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = fma(b[p], odd, acc[r][p]);
    }
  }
  if (k < count) {
    for (int p = 0; p < P; ++p) {
      const F32x16 a = Format::single(panels[p] + k * kPanel);
      for (int r = 0; r < R; ++r) acc[r][p] = fma(a, broadcast(x[r * stride + k]), acc[r][p]);
    }
  }
}

#if defined(__AVX512BF16__)
// The same of bfloat16 panels and rows, padded to whole pairs: for pairs ascending, acc = fma(panel[k], x[k], acc) of
// the odd k, then of the even one, subnormal numbers being zero.
template <class Format, int R, int P>
inline void add_products(const uint16_t* const (&panels)[P], const uint16_t* x, int64_t stride, int count,
                         F32x16 (&acc)[R][P]) {
  for (int k = 0; k < count; k += 2) {
    Bf16Pairs pairs[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      prefetch<2 * kPanel * sizeof(uint16_t)>(panels[p] + k * kPanel);
      pairs[p] = load_pairs(panels[p] + k * kPanel);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Bf16Pairs both = broadcast_pair(x + r * stride + k);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = add_dots(acc[r][p], pairs[p], both);
    }
  }
}
#endif

}  // namespace paceline::PACELINE_LEVEL
