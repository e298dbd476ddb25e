// Sixteen lanes in the compiler's own vectors (GCC, Clang): any processor.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "level.h"

namespace paceline::PACELINE_LEVEL {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef int32_t Mask16 __attribute__((vector_size(64)));

inline I32x16 broadcast_i32(int32_t x) { return I32x16{} + x; }
inline I32x16 lane_numbers() { return I32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline Mask16 lanes_between(int first, int last) { return (lane_numbers() >= first) & (lane_numbers() < last); }

inline F32x16 zero() { return F32x16{}; }
inline F32x16 broadcast(float x) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r[i] = x;
  return r;
}
inline F32x16 load(const float* p) {
  F32x16 r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
inline F32x16 load_first(const float* p, int n) {
  F32x16 r{};
  __builtin_memcpy(&r, p, sizeof(float) * static_cast<unsigned>(n));
  return r;
}
inline void store(float* p, F32x16 x) { __builtin_memcpy(p, &x, sizeof x); }
inline void store_first(float* p, F32x16 x, int n) {
  __builtin_memcpy(p, &x, sizeof(float) * static_cast<unsigned>(n));
}
inline F32x16 add(F32x16 a, F32x16 b) { return a + b; }
inline F32x16 sub(F32x16 a, F32x16 b) { return a - b; }
inline F32x16 mul(F32x16 a, F32x16 b) { return a * b; }
inline F32x16 div(F32x16 a, F32x16 b) { return a / b; }
inline I32x16 as_i32(F32x16 a) { return reinterpret_cast<I32x16>(a); }
inline F32x16 as_f32(I32x16 a) { return reinterpret_cast<F32x16>(a); }
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) { return as_f32((as_i32(yes) & m) | (as_i32(no) & ~m)); }
inline Mask16 less(F32x16 a, F32x16 b) { return a < b; }
inline F32x16 max(F32x16 a, F32x16 b) { return select(a > b, a, b); }  // b where one is NaN, as x86 has it

#if defined(__FP_FAST_FMAF)
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
#else
// No such instruction: the product is exact in double; the sum is rounded to odd there, so that the second rounding, to
// float, is as good as the only one (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  typedef double F64x4 __attribute__((vector_size(32)));
  typedef int64_t I64x4 __attribute__((vector_size(32)));
  typedef float F32x4 __attribute__((vector_size(16)));
  F32x16 r;
  for (int part = 0; part < 4; ++part) {
    F32x4 x, y, z;
    __builtin_memcpy(&x, reinterpret_cast<const char*>(&a) + 16 * part, 16);
    __builtin_memcpy(&y, reinterpret_cast<const char*>(&b) + 16 * part, 16);
    __builtin_memcpy(&z, reinterpret_cast<const char*>(&c) + 16 * part, 16);
    const F64x4 product = __builtin_convertvector(x, F64x4) * __builtin_convertvector(y, F64x4);
    const F64x4 term = __builtin_convertvector(z, F64x4);
    const F64x4 sum = product + term;
    const F64x4 taken = sum - product;
    const F64x4 error = (product - (sum - taken)) + (term - taken);
    const I64x4 bits = reinterpret_cast<I64x4>(sum);
    // Inexact and even: step to the odd neighbour on the error's side, away from zero if the signs agree.
    const I64x4 inexact = (error != 0.0) & (error - error == 0.0);
    const I64x4 step = ((reinterpret_cast<I64x4>(error) ^ bits) >> 63) | 1;
    const I64x4 odd = bits + (step & inexact & ((bits & 1) - 1));
    const F32x4 out = __builtin_convertvector(reinterpret_cast<F64x4>(odd), F32x4);
    __builtin_memcpy(reinterpret_cast<char*>(&r) + 16 * part, &out, 16);
  }
  return r;
}
#endif

inline I32x16 add(I32x16 a, I32x16 b) { return a + b; }
inline I32x16 max(I32x16 a, I32x16 b) { return (a & (a > b)) | (b & ~(a > b)); }
inline I32x16 bit_and(I32x16 a, I32x16 b) { return a & b; }
inline I32x16 shift_left_23(I32x16 a) { return a << 23; }
inline F32x16 to_f32(I32x16 a) { return __builtin_convertvector(a, F32x16); }
// To nearest, ties to even, for |a| < 2^22: the sum with 1.5 * 2^23 has no bits left below one.
inline I32x16 round_to_i32(F32x16 a) { return as_i32(a + 12582912.0f) - 0x4b400000; }

inline void store_i32(int32_t* p, I32x16 a) { __builtin_memcpy(p, &a, sizeof a); }
inline int32_t reduce_add(I32x16 a) {
  int32_t r = 0;
  for (int i = 0; i < 16; ++i) r += a[i];
  return r;
}
inline int32_t reduce_max(I32x16 a) {
  int32_t r = a[0];
  for (int i = 1; i < 16; ++i) r = a[i] > r ? a[i] : r;
  return r;
}
// The fixed tree: lane i and i + 8, then i and i + 4, i + 2, i + 1.
inline float reduce_add(F32x16 a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a[i] += a[i + step];
  }
  return a[0];
}
inline float reduce_max(F32x16 a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a[i] = a[i] > a[i + step] ? a[i] : a[i + step];
  }
  return a[0];
}

// Narrow numbers.
inline F32x16 load_f16(const uint16_t* p) {
  typedef uint16_t U16x16 __attribute__((vector_size(32)));
  U16x16 halves;
  __builtin_memcpy(&halves, p, sizeof halves);
  const I32x16 bits = __builtin_convertvector(halves, I32x16);
  const I32x16 magnitude = bits & 0x7fff;
  // 2^112 moves the exponent's bias from 15 to 127, subnormal numbers included.
  const F32x16 finite = as_f32(magnitude << 13) * 0x1p112f;
  const F32x16 special = as_f32((magnitude << 13) | 0x7f800000);
  return as_f32(as_i32(select(magnitude >= 0x7c00, special, finite)) | ((bits & 0x8000) << 16));
}
// 32 bf16 numbers as 16 words: the low halves, then the high halves.
inline void load_bf16_pairs(const uint16_t* p, F32x16& low, F32x16& high) {
  I32x16 words;
  __builtin_memcpy(&words, p, sizeof words);
  low = as_f32(words << 16);
  high = as_f32(words & static_cast<int32_t>(0xffff0000u));
}
// ---- integer dots of a group: 16 outputs in the lanes, 4 inputs in the bytes of a lane

inline I32x16 sub(I32x16 a, I32x16 b) { return a - b; }
inline I32x16 times_16(I32x16 a) { return a * 16; }
inline void store_i8(int8_t* p, I32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a[i]);
}
// As int16, of each four the first, third, second, fourth.
inline void store_words(int16_t* p, I32x16 a) {
  for (int i = 0; i < 16; i += 4) {
    p[i] = static_cast<int16_t>(a[i]);
    p[i + 1] = static_cast<int16_t>(a[i + 2]);
    p[i + 2] = static_cast<int16_t>(a[i + 1]);
    p[i + 3] = static_cast<int16_t>(a[i + 3]);
  }
}

struct NibbleWeights {
  I32x16 quants[32];  // by input
  void load(const uint8_t (&packed)[4][16][4]) {
    for (int s = 0; s < 4; ++s) {
      I32x16 words;
      __builtin_memcpy(&words, packed[s], sizeof words);
      for (int i = 0; i < 4; ++i) {
        quants[4 * s + i] = (words >> (8 * i)) & 15;
        quants[4 * s + i + 16] = (words >> (8 * i + 4)) & 15;
      }
    }
  }
};
template <int R, int P>
inline void nibble_dots(const NibbleWeights (&w)[P], const int8_t* x, I32x16 (&dot)[R][P]) {
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) dot[r][p] = I32x16{};
    for (int k = 0; k < 32; ++k) {
      for (int p = 0; p < P; ++p) dot[r][p] += w[p].quants[k] * x[r * 32 + k];
    }
  }
}

struct ByteWeights {
  I32x16 quants[32];  // in the order of Activations::words
  void load(const int8_t (&packed)[8][16][4]) {
    for (int s = 0; s < 8; ++s) {
      I32x16 words;
      __builtin_memcpy(&words, packed[s], sizeof words);
      quants[4 * s] = words << 24 >> 24;
      quants[4 * s + 1] = words << 8 >> 24;
      quants[4 * s + 2] = words << 16 >> 24;
      quants[4 * s + 3] = words >> 24;
    }
  }
};
template <bool kLong, int R, int P>
inline void byte_dots(const ByteWeights (&w)[P], const Activations& a, int64_t at, I32x16 (&dot)[R][P]) {
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) dot[r][p] = I32x16{};
    for (int k = 0; k < 32; ++k) {
      for (int p = 0; p < P; ++p) dot[r][p] += w[p].quants[k] * a.words[(at + r) * 32 + k];
    }
  }
}

constexpr int kNibbleRows = 1, kNibblePanels = 1;
constexpr bool kByteDotsOfWords = true;
constexpr int kByteRows = 1, kBytePanels = 1;
constexpr int kSums = 4;
constexpr int kDenseRows = 2;
constexpr int kAttentionRows = 2;

}  // namespace paceline::PACELINE_LEVEL
