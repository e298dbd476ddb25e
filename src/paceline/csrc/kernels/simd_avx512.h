// Sixteen lanes as one 512-bit register. VNNI, where compiled in, only changes how the integer dots are formed.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "level.h"

namespace paceline::PACELINE_LEVEL {

using F32x16 = __m512;
using I32x16 = __m512i;
using Bytes64 = __m512i;
using Mask16 = __mmask16;

inline Mask16 lanes_between(int first, int last) {
  return static_cast<Mask16>(((1u << last) - 1u) & ~((1u << first) - 1u));
}
inline Mask16 first_lanes(int n) { return lanes_between(0, n); }

inline F32x16 zero() { return _mm512_setzero_ps(); }
inline F32x16 broadcast(float x) { return _mm512_set1_ps(x); }
inline F32x16 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32x16 load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, F32x16 x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline F32x16 add(F32x16 a, F32x16 b) { return _mm512_add_ps(a, b); }
inline F32x16 sub(F32x16 a, F32x16 b) { return _mm512_sub_ps(a, b); }
inline F32x16 mul(F32x16 a, F32x16 b) { return _mm512_mul_ps(a, b); }
inline F32x16 div(F32x16 a, F32x16 b) { return _mm512_div_ps(a, b); }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32x16 max(F32x16 a, F32x16 b) { return _mm512_max_ps(a, b); }
inline Mask16 less(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) { return _mm512_mask_blend_ps(m, no, yes); }

inline I32x16 broadcast_i32(int32_t x) { return _mm512_set1_epi32(x); }
inline I32x16 add(I32x16 a, I32x16 b) { return _mm512_add_epi32(a, b); }
inline I32x16 max(I32x16 a, I32x16 b) { return _mm512_max_epi32(a, b); }
inline I32x16 bit_and(I32x16 a, I32x16 b) { return _mm512_and_si512(a, b); }
inline I32x16 shift_left_23(I32x16 a) { return _mm512_slli_epi32(a, 23); }
inline I32x16 as_i32(F32x16 a) { return _mm512_castps_si512(a); }
inline F32x16 as_f32(I32x16 a) { return _mm512_castsi512_ps(a); }
inline F32x16 to_f32(I32x16 a) { return _mm512_cvtepi32_ps(a); }
inline I32x16 round_to_i32(F32x16 a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
inline int32_t reduce_add(I32x16 a) { return _mm512_reduce_add_epi32(a); }
inline int32_t reduce_max(I32x16 a) { return _mm512_reduce_max_epi32(a); }

// The fixed tree: lane i and i + 8, then i and i + 4, i + 2, i + 1.
inline float reduce_add(F32x16 a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(F32x16 a) { return _mm512_reduce_max_ps(a); }

// Narrow numbers.
inline F32x16 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// 32 bf16 numbers as 16 words: the low halves, then the high halves.
inline void load_bf16_pairs(const uint16_t* p, F32x16& low, F32x16& high) {
  const __m512i words = _mm512_loadu_si512(p);
  low = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  high = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void store_i8(int8_t* p, I32x16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
inline void store_i32(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a); }

// ---- integer dots: 16 outputs in the 32-bit lanes, 4 inputs in the bytes of a lane

inline Bytes64 load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline Bytes64 broadcast_word(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
inline Bytes64 low_nibbles(Bytes64 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes64 high_nibbles(Bytes64 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }

#if defined(__AVX512VNNI__)

// Weights 0..15 times int8.
struct NibbleSum {
  __m512i sum = _mm512_setzero_si512();
  void add_product(Bytes64 weights, Bytes64 x) { sum = _mm512_dpbusd_epi32(sum, weights, x); }
  I32x16 total() const { return sum; }
};

// Weights -128..127 times int8. The instruction wants one side unsigned: 128 is added to the weights, and 128 times the
// sum of x is taken off at the start.
struct SignedWeights {
  __m512i biased;
  explicit SignedWeights(Bytes64 w) : biased(_mm512_xor_si512(w, _mm512_set1_epi8(-128))) {}
};
struct SignedSum {
  __m512i sum = _mm512_setzero_si512();
  void start(int32_t sum_of_x) { sum = _mm512_set1_epi32(-128 * sum_of_x); }
  void add_product(const SignedWeights& weights, Bytes64 x) { sum = _mm512_dpbusd_epi32(sum, weights.biased, x); }
  I32x16 total() const { return sum; }
};

#else

// A product of nibble and int8 is at most 15 * 127; the 16 that meet in one 16-bit lane over a group stay below 2^15.
struct NibbleSum {
  __m512i sum = _mm512_setzero_si512();
  void add_product(Bytes64 weights, Bytes64 x) { sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, x)); }
  I32x16 total() const { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
};

// |w| times x with w's sign: two products of at most 128 * 127 fit 16 bits.
struct SignedWeights {
  __m512i magnitude;
  __mmask64 negative;
  explicit SignedWeights(Bytes64 w) : magnitude(_mm512_abs_epi8(w)), negative(_mm512_movepi8_mask(w)) {}
};
struct SignedSum {
  __m512i sum = _mm512_setzero_si512();
  void start(int32_t) {}
  void add_product(const SignedWeights& weights, Bytes64 x) {
    const __m512i y = _mm512_mask_sub_epi8(x, weights.negative, _mm512_setzero_si512(), x);
    const __m512i pairs = _mm512_maddubs_epi16(weights.magnitude, y);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  I32x16 total() const { return sum; }
};

#endif

// Blocks of registers that fit 32 vector registers.
constexpr int kQuantizedRows = 8;
constexpr int kDenseRows = 12;
constexpr int kAttentionRows = 4;
constexpr int kAttentionVectors = 4;

}  // namespace paceline::PACELINE_LEVEL
