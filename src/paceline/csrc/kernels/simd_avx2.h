// Sixteen lanes as two 256-bit registers. VNNI, where compiled in, only changes how dots of int4 weights are formed.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
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
// Masked stores are slow on some processors, so full vectors do without.
inline void store_first(float* p, F32x16 x, int n) {
  if (n == 16) return store(p, x);
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
// ---- integer dots of a group: 16 outputs in the 32-bit lanes, 4 inputs in the bytes of a lane

inline I32x16 sub(I32x16 a, I32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline I32x16 times_16(I32x16 a) { return {_mm256_slli_epi32(a.lo, 4), _mm256_slli_epi32(a.hi, 4)}; }
inline void store_i8(int8_t* p, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
// As int16, of each four the first, third, second, fourth.
inline void store_words(int16_t* p, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
inline __m256i broadcast_word(const void* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}

// With 16 registers weights cannot stay in them: they are unpacked again for every few rows.
struct NibbleWeights {
  const __m256i* packed;  // [4 steps][2 halves]
  void load(const uint8_t (&group)[4][16][4]) { packed = reinterpret_cast<const __m256i*>(group); }
};

// Sums of products of nibbles and int8, and what they are in 32-bit lanes at the end of a group.
#if defined(__AVXVNNI__)
inline __m256i add_nibble_products(__m256i sum, __m256i nibbles, __m256i four) {
  return _mm256_dpbusd_avx_epi32(sum, nibbles, four);
}
inline __m256i widened(__m256i sum) { return sum; }
#else
// A product is at most 15 * 127; the 16 that meet in one 16-bit lane over a group stay below 2^15.
inline __m256i add_nibble_products(__m256i sum, __m256i nibbles, __m256i four) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, four));
}
inline __m256i widened(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

template <int R, int P>
inline void nibble_dots(const NibbleWeights (&w)[P], const int8_t* x, I32x16 (&dot)[R][P]) {
  const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    __m256i sum[R][2];
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const __m256i both[2] = {_mm256_loadu_si256(w[p].packed + 2 * s), _mm256_loadu_si256(w[p].packed + 2 * s + 1)};
#pragma GCC unroll 2
      for (int high = 0; high < 2; ++high) {
        __m256i quants[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          quants[half] = _mm256_and_si256(high ? _mm256_srli_epi16(both[half], 4) : both[half], mask);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256i four = broadcast_word(x + r * 32 + 4 * (s + 4 * high));
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const __m256i before = s == 0 && !high ? _mm256_setzero_si256() : sum[r][half];
            sum[r][half] = add_nibble_products(before, quants[half], four);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) dot[r][p] = {widened(sum[r][0]), widened(sum[r][1])};
  }
}

// Widened to 16 bits: of four inputs the first and third, then the second and fourth. So the quants of 12 bits cost no
// more than those of 8.
struct ByteWeights {
  const __m256i* packed;  // [8 steps][2 halves]
  void load(const int8_t (&group)[8][16][4]) { packed = reinterpret_cast<const __m256i*>(group); }
};
template <bool kLong, int R, int P>
inline void byte_dots(const ByteWeights (&w)[P], const Activations& a, int64_t at, I32x16 (&dot)[R][P]) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      const __m256i four[2] = {_mm256_loadu_si256(w[p].packed + 2 * s), _mm256_loadu_si256(w[p].packed + 2 * s + 1)};
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        __m256i words[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          words[half] = _mm256_srai_epi16(odd ? four[half] : _mm256_slli_epi16(four[half], 8), 8);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m256i two = broadcast_word(a.words + (at + r) * 32 + 4 * s + 2 * odd);
          const I32x16 products = {_mm256_madd_epi16(words[0], two), _mm256_madd_epi16(words[1], two)};
          dot[r][p] = s == 0 && !odd ? products : add(dot[r][p], products);
        }
      }
    }
  }
}

// Blocks that fit 16 vector registers.
constexpr int kNibbleRows = 4, kNibblePanels = 1;
constexpr int kByteRows = 4, kBytePanels = 1;
constexpr bool kByteDotsOfWords = true;
constexpr int kSums = 4;
constexpr int kDenseRows = 4;
constexpr int kAttentionRows = 4;

}  // namespace paceline::PACELINE_LEVEL
