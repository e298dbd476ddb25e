// Sixteen lanes as one 512-bit register. VNNI, where compiled in, only changes how the integer dots are formed; BF16
// adds a dot of bfloat16 pairs.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "level.h"

namespace paceline::PACELINE_LEVEL {

using F32x16 = __m512;
using I32x16 = __m512i;
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
// In the same tree, for the intrinsic's order has other signs of zero and other NaN.
inline float reduce_max(F32x16 a) {
  const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}

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
inline I32x16 load_i32(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_i32(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a); }

#if defined(__AVX512BF16__)
using Bf16Pairs = __m512bh;
inline Bf16Pairs load_pairs(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
inline Bf16Pairs broadcast_pair(const uint16_t* p) {
  int32_t two;
  __builtin_memcpy(&two, p, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
}
// To sum: the product of the pairs' second numbers, then that of their first ones, each by fma.
inline F32x16 add_dots(F32x16 sum, Bf16Pairs a, Bf16Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
// To nearest, ties to even.
inline void store_bf16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a)));
}
#endif

// ---- integer dots of a group: 16 outputs in the 32-bit lanes, 4 inputs in the bytes of a lane

inline I32x16 sub(I32x16 a, I32x16 b) { return _mm512_sub_epi32(a, b); }
inline I32x16 times_16(I32x16 a) { return _mm512_slli_epi32(a, 4); }
inline void store_i8(int8_t* p, I32x16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
// As int16, of each four the first, third, second, fourth.
inline void store_words(int16_t* p, I32x16 a) {
  const __m256i words = _mm512_cvtepi32_epi16(a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
inline __m512i broadcast_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

struct NibbleWeights {
  __m512i quants[8];
  void load(const uint8_t (&packed)[4][16][4]) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int s = 0; s < 4; ++s) {
      const __m512i both = _mm512_loadu_si512(packed[s]);
      quants[s] = _mm512_and_si512(both, mask);
      quants[s + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
  }
};

#if defined(__AVX512VNNI__)

// The instruction wants one side unsigned, which nibbles are.
template <int R, int P>
inline void nibble_dots(const NibbleWeights (&w)[P], const int8_t* x, I32x16 (&dot)[R][P]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) dot[r][p] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const __m512i four = broadcast_word(x + r * 32 + 4 * s);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], w[p].quants[s], four);
    }
  }
}

// 128 is added to the weights, and 128 times the sum of x taken off.
struct ByteWeights {
  __m512i biased[8];
  void load(const int8_t (&packed)[8][16][4]) {
    for (int s = 0; s < 8; ++s) {
      biased[s] = _mm512_xor_si512(_mm512_loadu_si512(packed[s]), _mm512_set1_epi8(-128));
    }
  }
};
template <int P>
inline void digit_dots(const ByteWeights (&w)[P], const int8_t* x, int32_t sum_of_x, I32x16 (&dot)[P]) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) dot[p] = _mm512_set1_epi32(-128 * sum_of_x);
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
    const __m512i four = broadcast_word(x + 4 * s);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) dot[p] = _mm512_dpbusd_epi32(dot[p], w[p].biased[s], four);
  }
}
template <bool kLong, int R, int P>
inline void byte_dots(const ByteWeights (&w)[P], const Activations& a, int64_t at, I32x16 (&dot)[R][P]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    digit_dots(w, a.high + (at + r) * 32, a.high_sums[at + r], dot[r]);
    if constexpr (kLong) {
      I32x16 low[P];
      digit_dots(w, a.low + (at + r) * 32, a.low_sums[at + r], low);
      for (int p = 0; p < P; ++p) dot[r][p] = add(times_16(dot[r][p]), low[p]);
    }
  }
}
constexpr int kBytePanels = 2;
constexpr bool kByteDotsOfWords = false;

#else

// A product of nibble and int8 is at most 15 * 127; the 16 that meet in one 16-bit lane over a group stay below 2^15.
template <int R, int P>
inline void nibble_dots(const NibbleWeights (&w)[P], const int8_t* x, I32x16 (&dot)[R][P]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const __m512i four = broadcast_word(x + r * 32 + 4 * s);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const __m512i products = _mm512_maddubs_epi16(w[p].quants[s], four);
        dot[r][p] = s == 0 ? products : _mm512_add_epi16(dot[r][p], products);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) dot[r][p] = _mm512_madd_epi16(dot[r][p], _mm512_set1_epi16(1));
  }
}

// Widened to 16 bits: of four inputs the first and third, then the second and fourth. So the quants of 12 bits cost no
// more than those of 8.
struct ByteWeights {
  __m512i words[16];
  void load(const int8_t (&packed)[8][16][4]) {
    for (int s = 0; s < 8; ++s) {
      const __m512i four = _mm512_loadu_si512(packed[s]);
      words[2 * s] = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8);
      words[2 * s + 1] = _mm512_srai_epi16(four, 8);
    }
  }
};
template <bool kLong, int R, int P>
inline void byte_dots(const ByteWeights (&w)[P], const Activations& a, int64_t at, I32x16 (&dot)[R][P]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int s = 0; s < 16; ++s) {
      const __m512i two = broadcast_word(a.words + (at + r) * 32 + 2 * s);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const __m512i products = _mm512_madd_epi16(w[p].words[s], two);
        dot[r][p] = s == 0 ? products : _mm512_add_epi32(dot[r][p], products);
      }
    }
  }
}
constexpr int kBytePanels = 1;
constexpr bool kByteDotsOfWords = true;

#endif

// Blocks that fit 32 vector registers, the weights of a group among them.
constexpr int kNibbleRows = 1, kNibblePanels = 2;
constexpr int kByteRows = 1;
constexpr int kSums = 24;
constexpr int kDenseRows = 12;
constexpr int kAttentionRows = 8;

}  // namespace paceline::PACELINE_LEVEL
