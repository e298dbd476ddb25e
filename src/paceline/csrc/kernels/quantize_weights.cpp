// Dense weights rounded to a group of a quantised form: 16 outputs in the lanes, each with a scale of its own.
#include "level_kernels.h"
#include "simd.h"

namespace paceline {
// encodings.h has these; its inline functions do not belong here.
float half_to_float(uint16_t half);
uint16_t float_to_half(float x);
}  // namespace paceline

namespace paceline::PACELINE_LEVEL {
namespace {

constexpr int kTrials = 4;

F32x16 smaller(F32x16 a, F32x16 b) { return select(less(a, b), a, b); }
F32x16 clamp(F32x16 x, float low, float high) { return smaller(max(x, broadcast(low)), broadcast(high)); }
F32x16 round(F32x16 x) { return to_f32(round_to_i32(x)); }

// 1 / x, and 0 where x is not positive.
F32x16 inverse(F32x16 x) { return select(less(zero(), x), div(broadcast(1.0f), x), zero()); }

// Sixteen numbers as float16, and what they have become. False if one of them has not become finite.
bool to_halves(F32x16 x, uint16_t* halves, F32x16& rounded) {
  float numbers[kPanel];
  store(numbers, x);
  bool finite = true;
  for (int i = 0; i < kPanel; ++i) {
    halves[i] = float_to_half(numbers[i]);
    numbers[i] = half_to_float(halves[i]);
    finite &= (halves[i] & 0x7c00) != 0x7c00;
  }
  rounded = load(numbers);
  return finite;
}

void store_bytes(uint8_t* p, I32x16 x) { store_i8(reinterpret_cast<int8_t*>(p), x); }

// Four inputs' bytes, by output, as a step of a group has them: four bytes to an output.
void interleave(const uint8_t (*bytes)[kPanel], void* step) {
  uint32_t words[kPanel];
  for (int i = 0; i < kPanel; ++i) {
    words[i] = bytes[0][i] | static_cast<uint32_t>(bytes[1][i]) << 8 | static_cast<uint32_t>(bytes[2][i]) << 16 |
               static_cast<uint32_t>(bytes[3][i]) << 24;
  }
  __builtin_memcpy(step, words, sizeof words);
}

// weight = scale * code + minimum
struct Grid {
  F32x16 scale, minimum;
  F32x16 code(F32x16 x, F32x16 inverse_scale) const { return round(clamp(mul(sub(x, minimum), inverse_scale), 0, 15)); }
};

F32x16 squared_error(const float* x, const Grid& grid) {
  const F32x16 inverse_scale = inverse(grid.scale);
  F32x16 sum = zero();
  for (int k = 0; k < kGroup; ++k) {
    const F32x16 w = load(x + kPanel * k);
    const F32x16 error = sub(w, add(mul(grid.code(w, inverse_scale), grid.scale), grid.minimum));
    sum = add(sum, mul(error, error));
  }
  return sum;
}

// The grid on which the codes that `grid` gives to x would have the least squared error: a line fitted to (code, x).
Grid fit(const float* x, F32x16 sum, const Grid& grid) {
  const F32x16 inverse_scale = inverse(grid.scale), count = broadcast(kGroup);
  F32x16 codes = zero(), squares = zero(), products = zero();
  for (int k = 0; k < kGroup; ++k) {
    const F32x16 w = load(x + kPanel * k), code = grid.code(w, inverse_scale);
    codes = add(codes, code);
    squares = add(squares, mul(code, code));
    products = add(products, mul(code, w));
  }
  const F32x16 spread = sub(mul(count, squares), mul(codes, codes));
  const F32x16 covariance = sub(mul(count, products), mul(sum, codes));
  const F32x16 scale = select(less(zero(), spread), div(covariance, spread), grid.scale);
  return {scale, mul(sub(sum, mul(scale, codes)), broadcast(1.0f / kGroup))};
}

}  // namespace

bool quantize_weights_int8(const float* x, Int8Group& group) {
  F32x16 largest = zero(), poison = zero();
  for (int k = 0; k < kGroup; ++k) {
    const F32x16 w = load(x + kPanel * k);
    largest = max(largest, absolute(w));
    poison = add(poison, mul(w, zero()));
  }
  F32x16 scale;
  const bool fits = to_halves(div(largest, broadcast(127.0f)), group.scales, scale);
  const F32x16 inverse_scale = inverse(scale);
  uint8_t quants[kGroup][kPanel];
  for (int k = 0; k < kGroup; ++k) {
    store_bytes(quants[k], round_to_i32(clamp(mul(load(x + kPanel * k), inverse_scale), -127, 127)));
  }
  for (int s = 0; s < kGroup / 4; ++s) interleave(quants + 4 * s, group.quants[s]);
  return fits && reduce_add(poison) == 0.0f;
}

bool quantize_weights_int4(const float* x, Int4Group& group) {
  F32x16 low = load(x), high = low, poison = zero();
  for (int k = 0; k < kGroup; ++k) {
    const F32x16 w = load(x + kPanel * k);
    low = smaller(low, w);
    high = max(high, w);
    poison = add(poison, mul(w, zero()));
  }
  // Relative to the smallest, so that no sum below has to cancel a common part.
  float shifted[kGroup * kPanel];
  F32x16 sum = zero();
  for (int k = 0; k < kGroup; ++k) {
    const F32x16 w = sub(load(x + kPanel * k), low);
    store(shifted + kPanel * k, w);
    sum = add(sum, w);
  }
  const F32x16 range = sub(high, low);
  Grid best{mul(range, broadcast(1.0f / 15)), zero()};
  F32x16 least = squared_error(shifted, best);
  // Grids of slightly different steps round some weights to other codes. Each is moved twice to where its codes have
  // the least error; of what that leads to, the best stays.
  for (int trial = 0; trial < kTrials; ++trial) {
    const float steps = 14.25f + 0.5f * static_cast<float>(trial);
    const Grid start{mul(range, broadcast(1.0f / steps)), zero()};
    const Grid grid = fit(shifted, sum, fit(shifted, sum, start));
    const F32x16 error = squared_error(shifted, grid);
    const Mask16 better = less(error, least);
    least = select(better, error, least);
    best.scale = select(better, grid.scale, best.scale);
    best.minimum = select(better, grid.minimum, best.minimum);
  }
  Grid stored;
  bool fits = to_halves(best.scale, group.scales, stored.scale);
  fits &= to_halves(add(best.minimum, low), group.minima, stored.minimum);
  const F32x16 inverse_scale = inverse(stored.scale);
  uint8_t codes[kGroup][kPanel];
  for (int k = 0; k < kGroup; ++k) {
    store_bytes(codes[k], round_to_i32(stored.code(load(x + kPanel * k), inverse_scale)));
  }
  for (int k = 0; k < kGroup / 2; ++k) {
    for (int i = 0; i < kPanel; ++i) codes[k][i] = static_cast<uint8_t>(codes[k][i] | codes[k + kGroup / 2][i] << 4);
  }
  for (int s = 0; s < kGroup / 8; ++s) interleave(codes + 4 * s, group.quants[s]);
  return fits && reduce_add(poison) == 0.0f;
}

}  // namespace paceline::PACELINE_LEVEL
