// Sixteen lanes as two 256-bit registers.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "level.h"

namespace paceline::PACELINE_LEVEL {

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};
struct Mask16 {
  __m256 lo, hi;
};
using Bytes64 = I32x16;

inline Mask16 first_lanes(int n) {
  const __m256i count = _mm256_set1_epi32(n);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
inline Mask16 lanes_between(int first, int last) {
  const Mask16 below = first_lanes(first), upto = first_lanes(last);
  return {_mm256_andnot_ps(below.lo, upto.lo), _mm256_andnot_ps(below.hi, upto.hi)};
}

inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x16 load_first(const float* p, int n) {
  const Mask16 m = first_lanes(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
inline void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline void store_first(float* p, F32x16 x, int n) {
  const Mask16 m = first_lanes(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), x.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), x.hi);
}
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Mask16 less(F32x16 a, F32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}

inline I32x16 broadcast_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32x16 max(I32x16 a, I32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline I32x16 bit_and(I32x16 a, I32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline I32x16 shift_left_23(I32x16 a) { return {_mm256_slli_epi32(a.lo, 23), _mm256_slli_epi32(a.hi, 23)}; }
inline I32x16 as_i32(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline F32x16 as_f32(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline F32x16 to_f32(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32x16 round_to_i32(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

inline void store_i32(int32_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline int32_t reduce_add(I32x16 a) {
  const __m256i b = _mm256_add_epi32(a.lo, a.hi);
  __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
inline int32_t reduce_max(I32x16 a) {
  const __m256i b = _mm256_max_epi32(a.lo, a.hi);
  __m128i c = _mm_max_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
// The fixed tree: lane i and i + 8, then i and i + 4, i + 2, i + 1.
inline float reduce_add(F32x16 a) {
  const __m256 b = _mm256_add_ps(a.lo, a.hi);
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(F32x16 a) {
  const __m256 b = _mm256_max_ps(a.lo, a.hi);
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

// Narrow numbers.
inline F32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// 32 bf16 numbers as 16 words: the low halves, then the high halves.
inline void load_bf16_pairs(const uint16_t* p, F32x16& low, F32x16& high) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  low = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  high = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}
inline void store_i8(int8_t* p, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// ---- integer dots: 16 outputs in the 32-bit lanes, 4 inputs in the bytes of a lane

inline Bytes64 load_bytes(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Bytes64 broadcast_word(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return broadcast_i32(word);
}
inline Bytes64 low_nibbles(Bytes64 a) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
inline Bytes64 high_nibbles(Bytes64 a) { return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }

// A product of nibble and int8 is at most 15 * 127; the 16 that meet in one 16-bit lane over a group stay below 2^15.
struct NibbleSum {
  __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();
  void add_product(Bytes64 weights, Bytes64 x) {
    lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(weights.lo, x.lo));
    hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(weights.hi, x.hi));
  }
  I32x16 total() const {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(lo, one), _mm256_madd_epi16(hi, one)};
  }
};

// |w| times x with w's sign: two products of at most 128 * 127 fit 16 bits.
struct SignedWeights {
  Bytes64 weights, magnitude;
  explicit SignedWeights(Bytes64 w) : weights(w), magnitude{_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)} {}
};
struct SignedSum {
  __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();
  void start(int32_t) {}
  void add_product(const SignedWeights& w, Bytes64 x) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i a = _mm256_maddubs_epi16(w.magnitude.lo, _mm256_sign_epi8(x.lo, w.weights.lo));
    const __m256i b = _mm256_maddubs_epi16(w.magnitude.hi, _mm256_sign_epi8(x.hi, w.weights.hi));
    lo = _mm256_add_epi32(lo, _mm256_madd_epi16(a, one));
    hi = _mm256_add_epi32(hi, _mm256_madd_epi16(b, one));
  }
  I32x16 total() const { return {lo, hi}; }
};

// Blocks of registers that fit 16 vector registers.
constexpr int kQuantizedRows = 4;
constexpr int kDenseRows = 3;
constexpr int kAttentionRows = 2;
constexpr int kAttentionVectors = 2;

}  // namespace paceline::PACELINE_LEVEL
