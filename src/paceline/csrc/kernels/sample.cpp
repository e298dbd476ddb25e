// Scans over a row of logits, for the choice of tokens (choice.h).
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {

RowPeak find_peak(const float* x, int count) {
  F32x16 largest = broadcast(-infinity()), numbers = zero();
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F32x16 v = load(x + i);
    largest = max(v, largest);
    numbers = add(numbers, sub(v, v));  // NaN from the first NaN or infinity on
  }
  float peak = reduce_max(largest);
  float odd = reduce_add(numbers);
  for (; i < count; ++i) {
    peak = x[i] > peak ? x[i] : peak;
    odd += x[i] - x[i];
  }
  RowPeak result{peak, -1, false};
  if (odd != odd) {  // minus infinity is legal, a NaN is not
    for (int j = 0; j < count; ++j) result.has_nan |= x[j] != x[j];
  }
  for (int j = 0; j < count && result.index < 0; ++j) {
    if (x[j] == peak) result.index = j;
  }
  return result;
}

void scale_row(const float* x, int count, float peak, float temperature, float* z, float* mass) {
  const F32x16 p = broadcast(peak), t = broadcast(temperature);
  for (int i = 0; i < count; i += kLanes) {
    const int n = count - i < kLanes ? count - i : kLanes;
    const F32x16 scaled = div(sub(load_first(x + i, n), p), t);
    store_first(z + i, scaled, n);
    store_first(mass + i, exp(scaled), n);
  }
}

double sum_row(const float* x, int count) {
  constexpr int kTile = 1024;
  double total = 0.0;
  for (int start = 0; start < count; start += kTile) {
    const int end = start + kTile < count ? start + kTile : count;
    F32x16 sum = zero();
    for (int i = start; i < end; i += kLanes) sum = add(sum, load_first(x + i, end - i < kLanes ? end - i : kLanes));
    total += static_cast<double>(reduce_add(sum));
  }
  return total;
}

int count_at_least(const float* x, int count, float bound) {
  int result = 0;
  for (int i = 0; i < count; ++i) result += x[i] >= bound;
  return result;
}

int collect_at_least(const float* x, int count, float bound, int32_t* ids) {
  int found = 0;
  for (int i = 0; i < count; i += kLanes) {
    const int n = count - i < kLanes ? count - i : kLanes;
    if (n == kLanes && reduce_max(load(x + i)) < bound) continue;
    for (int j = i; j < i + n; ++j) {
      if (x[j] >= bound) ids[found++] = j;
    }
  }
  return found;
}

int collect_contenders(const float* mass, int first, int count, uint64_t row, float factor, int32_t* ids) {
  float gap[kNoiseTile];
  for (int i = 0; i < count; ++i) {
    uint64_t x = row + (static_cast<uint64_t>(first + i) + 1) * 0x9E3779B97F4A7C15u;
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBu;
    x ^= x >> 31;
    gap[i] = static_cast<float>(static_cast<int32_t>(~x >> 40)) * 0x1p-24f;
  }
  int found = 0;
  for (int i = 0; i < count; ++i) {
    if (gap[i] <= mass[first + i] * factor) ids[found++] = first + i;
  }
  return found;
}

}  // namespace paceline::PACELINE_LEVEL
