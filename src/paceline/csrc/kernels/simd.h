// The vector type of the level at hand, and the functions that are the same on all of them: F32x16, sixteen float lanes
// whose every operation, sums included, gives the same bits on every level.
#pragma once
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace paceline::PACELINE_LEVEL {

constexpr int kLanes = 16;

// Asks for what follows, in a stream of weights, the `Bytes` at p by a few thousand bytes: few rows use them up faster
// than the processor's own prefetching brings them.
constexpr int kBytesAhead = 8192;
template <int Bytes>
inline void prefetch(const void* p) {
#pragma GCC unroll 16
  for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + kBytesAhead + i);
}

inline float infinity() { return __builtin_inff(); }

inline F32x16 absolute(F32x16 x) { return as_f32(bit_and(as_i32(x), broadcast_i32(0x7fffffff))); }

// e^x to about one unit in the last place: x = n ln 2 + r, then a polynomial fitted on |r| <= ln 2 / 2. Zero below the
// smallest normal result (x < -87.33), infinity from 88.37 up.
inline F32x16 exp(F32x16 x) {
  const F32x16 low = broadcast(-87.33f), high = broadcast(88.37f);
  const Mask16 under = less(x, low), over = less(high, x);
  const F32x16 inside = select(under, low, select(over, high, x));
  const I32x16 n = round_to_i32(mul(inside, broadcast(1.44269504f)));
  const F32x16 nf = to_f32(n);
  F32x16 r = fma(nf, broadcast(-0.693359375f), inside);
  r = fma(nf, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(0x1.6d771cp-10f);
  p = fma(p, r, broadcast(0x1.120cbep-7f));
  p = fma(p, r, broadcast(0x1.5554b8p-5f));
  p = fma(p, r, broadcast(0x1.5554dcp-3f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(mul(r, r), p, add(r, broadcast(1.0f)));
  const F32x16 scaled = mul(p, as_f32(shift_left_23(add(n, broadcast_i32(127)))));
  return select(under, zero(), select(over, broadcast(infinity()), scaled));
}

// x / (1 + e^-x)
inline F32x16 silu(F32x16 x) { return div(x, add(broadcast(1.0f), exp(sub(zero(), x)))); }

// x * Phi(x), Phi by its tanh form: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
inline F32x16 gelu_tanh(F32x16 x) {
  const F32x16 cube = mul(mul(x, x), x);
  const F32x16 u = mul(broadcast(0.79788456f), fma(cube, broadcast(0.044715f), x));
  return div(x, add(broadcast(1.0f), exp(mul(broadcast(-2.0f), u))));
}

// x * sigmoid(1.702 x)
inline F32x16 quick_gelu(F32x16 x) { return div(x, add(broadcast(1.0f), exp(mul(broadcast(-1.702f), x)))); }

// x * Phi(x). With z = |x| / sqrt(2), e^(z^2) erfc(z) is a polynomial fitted in 1 / (1 + 0.48 z), without constant
// term; Phi is half of erfc(z) left of zero, and 1 less that to the right of it.
inline F32x16 gelu(F32x16 x) {
  const F32x16 one = broadcast(1.0f);
  const F32x16 t = div(one, fma(broadcast(0x1.5b8eap-2f), absolute(x), one));
  F32x16 p = broadcast(-0x1.976ad2p-5f);
  p = fma(p, t, broadcast(0x1.12b022p-2f));
  p = fma(p, t, broadcast(-0x1.0e5f1p-1f));
  p = fma(p, t, broadcast(0x1.8d1826p-2f));
  p = fma(p, t, broadcast(-0x1.4083e4p-4f));
  p = fma(p, t, broadcast(0x1.cff886p-3f));
  p = fma(p, t, broadcast(0x1.d933d8p-3f));
  p = fma(p, t, broadcast(0x1.162752p-2f));
  p = fma(p, t, broadcast(0x1.1546acp-2f));
  const F32x16 half_square = mul(mul(broadcast(-0.5f), x), x);
  const F32x16 tail = mul(mul(mul(broadcast(0.5f), t), p), exp(half_square));
  return mul(x, select(less(x, zero()), tail, sub(one, tail)));
}

// An odd polynomial near zero, where the quotient would cancel; 1 - 2 / (e^2|x| + 1) with x's sign elsewhere.
inline F32x16 tanh(F32x16 x) {
  const F32x16 size = absolute(x), square = mul(x, x);
  F32x16 p = broadcast(-0x1.8fbef4p-8f);
  p = fma(p, square, broadcast(0x1.580eecp-6f));
  p = fma(p, square, broadcast(-0x1.b926acp-5f));
  p = fma(p, square, broadcast(0x1.110e1ep-3f));
  p = fma(p, square, broadcast(-0x1.555552p-2f));
  const F32x16 near = fma(mul(p, square), x, x);
  const F32x16 quotient = div(broadcast(2.0f), add(exp(add(size, size)), broadcast(1.0f)));
  const F32x16 far = sub(broadcast(1.0f), quotient);
  return select(less(size, broadcast(0.625f)), near, select(less(x, zero()), sub(zero(), far), far));
}

}  // namespace paceline::PACELINE_LEVEL
