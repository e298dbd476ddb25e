// Linear layers with int8 and int4 weights in groups of 32, and the activations that go with them.
//
// For each output: for g ascending, acc = fma(dot * row scale, weight scale, acc), the dot being exact; with minima
// then acc = fma(weight minimum, row scale * sum of the row's quants, acc).
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

// A group has 15 bits if its largest magnitude exceeds this many times the row's root mean square. Rounding to 8 bits
// then costs no group more than one in 110 of that mean.
constexpr float kLongAbove = 4.0f;
constexpr float kLargestShort = 127.0f, kLargestLong = 127.0f * 128.0f;

// Lane i sums the squares of elements i, i + 16, ... by fma; the lanes meet in the fixed tree.
float long_threshold(const float* x, int inputs) {
  F32x16 sum = zero();
  int i = 0;
  for (; i + kLanes <= inputs; i += kLanes) {
    const F32x16 v = load(x + i);
    sum = fma(v, v, sum);
  }
  if (i < inputs) {
    const F32x16 v = load_first(x + i, inputs - i);
    sum = fma(v, v, sum);
  }
  return kLongAbove * __builtin_sqrtf(reduce_add(sum) / static_cast<float>(inputs));
}

// One row's group: scale = largest magnitude / largest quant, quants rounded to nearest even. A group with an infinity
// or a NaN gets a NaN scale, so that it spoils its own row and no other; one below 2^-100 counts as zero. Returns
// whether it has 15 bits.
bool quantize_group(const float* x, int count, float threshold, const Activations& a, int at) {
  const F32x16 first = load_first(x, count < kLanes ? count : kLanes);
  const F32x16 second = count > kLanes ? load_first(x + kLanes, count - kLanes) : zero();
  const int32_t largest_bits =
      reduce_max(max(as_i32(absolute(first)), as_i32(absolute(second))));  // as integers NaN is largest
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  const bool finite = largest_bits < 0x7f800000, zeros = !finite || largest < 0x1p-100f;
  const bool is_long = !zeros && largest > threshold;
  const float largest_quant = is_long ? kLargestLong : kLargestShort;
  const F32x16 inverse = broadcast(zeros ? 0.0f : largest_quant / largest);
  int32_t high_sum = 0, low_sum = 0;
  for (int half = 0; half < 2; ++half) {
    const int offset = at * kGroup + half * kLanes;
    const I32x16 q = zeros ? broadcast_i32(0) : round_to_i32(mul(half == 0 ? first : second, inverse));
    I32x16 high = q;
    if (is_long) {
      high = round_to_i32(mul(to_f32(q), broadcast(1.0f / 128.0f)));
      const I32x16 low = sub(q, times_128(high));
      store_i8(a.low + offset, low);
      low_sum += reduce_add(low);
    }
    store_i8(a.high + offset, high);
    store_whole(a.whole + offset, q);
    high_sum += reduce_add(high);
  }
  const float scale = finite ? (zeros ? 0.0f : largest / largest_quant) : __builtin_nanf("");
  a.scales[at] = scale;
  a.scaled_sums[at] = scale * static_cast<float>(is_long ? 128 * high_sum + low_sum : high_sum);
  a.high_sums[at] = high_sum;
  a.low_sums[at] = low_sum;
  return is_long;
}

struct Int8 {
  using Group = Int8Group;
  using Weights = ByteWeights;
  static constexpr bool kHasMinima = false;
  static constexpr int kPanels = kBytePanels;
  template <bool kLong, int P>
  static inline void dots(const Weights (&w)[P], const Activations& a, int at, I32x16 (&dot)[P]) {
    byte_dots<kLong, P>(w, a, at, dot);
  }
};

struct Int4 {
  using Group = Int4Group;
  using Weights = NibbleWeights;
  static constexpr bool kHasMinima = true;
  static constexpr int kPanels = kNibblePanels;
  template <bool kLong, int P>
  static inline void dots(const Weights (&w)[P], const Activations& a, int at, I32x16 (&dot)[P]) {
    nibble_dots<P>(w, a.high + at * kGroup, dot);
    if constexpr (kLong) {
      I32x16 low[P];
      nibble_dots<P>(w, a.low + at * kGroup, low);
      for (int p = 0; p < P; ++p) dot[p] = add(times_128(dot[p]), low[p]);
    }
  }
};

template <int P>
using Accumulators = float[kBlockRows][P][kLanes];

// A group's weights, unpacked once for all rows of the block.
template <class Form, int P>
struct GroupWeights {
  typename Form::Weights quants[P];
  F32x16 scales[P], minima[P];

  void load(const typename Form::Group* const (&w)[P], int g) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      quants[p].load(w[p][g].quants);
      scales[p] = load_f16(w[p][g].scales);
      if constexpr (Form::kHasMinima) minima[p] = load_f16(w[p][g].minima);
    }
  }
};

template <class Form, int P, bool kLong>
inline void add_rows(const GroupWeights<Form, P>& w, const Activations& a, int g, const uint8_t* rows, int count,
                     Accumulators<P>& acc) {
  for (int i = 0; i < count; ++i) {
    const int row = rows[i], at = g * a.rows + row;
    I32x16 dot[P];
    Form::template dots<kLong, P>(w.quants, a, at, dot);
    const F32x16 scale = broadcast(a.scales[at]);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      F32x16 sum = fma(mul(to_f32(dot[p]), scale), w.scales[p], PACELINE_LEVEL::load(acc[row][p]));
      if constexpr (Form::kHasMinima) sum = fma(w.minima[p], broadcast(a.scaled_sums[at]), sum);
      store(acc[row][p], sum);
    }
  }
}

template <class Form, int P>
void multiply(const Activations& a, const PanelRange& range, int first_panel) {
  const typename Form::Group* w[P];
  for (int p = 0; p < P; ++p) {
    w[p] = reinterpret_cast<const typename Form::Group*>(static_cast<const char*>(range.weights) +
                                                         (first_panel + p) * range.panel_bytes);
  }
  alignas(64) Accumulators<P> acc;
  for (int r = 0; r < a.rows; ++r) {
    for (int p = 0; p < P; ++p) store(acc[r][p], zero());
  }
  for (int g = 0; g < a.groups; ++g) {
    GroupWeights<Form, P> weights;
    weights.load(w, g);
    const uint8_t* rows = a.order + g * a.rows;
    const int num_short = a.num_short[g];
    add_rows<Form, P, false>(weights, a, g, rows, num_short, acc);
    add_rows<Form, P, true>(weights, a, g, rows + num_short, a.rows - num_short, acc);
  }
  for (int p = 0; p < P; ++p) {
    const int column = (first_panel + p) * kPanel;
    const int left = range.outputs - column < kPanel ? range.outputs - column : kPanel;
    for (int r = 0; r < a.rows; ++r) {
      F32x16 y = load(acc[r][p]);
      if (range.bias) y = add(y, load(range.bias + column));
      store_first(range.out + r * range.out_stride + column, y, left);
    }
  }
}

template <class Form>
void multiply_panels(const Activations& a, const PanelRange& range) {
  int panel = 0;
  for (; panel + Form::kPanels <= range.panels; panel += Form::kPanels) multiply<Form, Form::kPanels>(a, range, panel);
  for (; panel < range.panels; ++panel) multiply<Form, 1>(a, range, panel);
}

}  // namespace

void quantize_rows(const float* x, int64_t stride, int inputs, const Activations& a, int first_group, int num_groups) {
  float thresholds[kBlockRows];
  for (int r = 0; r < a.rows; ++r) thresholds[r] = long_threshold(x + r * stride, inputs);
  for (int g = first_group; g < first_group + num_groups; ++g) {
    const int first = g * kGroup;
    const int count = inputs - first < kGroup ? inputs - first : kGroup;
    uint8_t* order = a.order + g * a.rows;
    int num_short = 0, end = a.rows;
    for (int r = 0; r < a.rows; ++r) {
      const bool is_long = quantize_group(x + r * stride + first, count, thresholds[r], a, g * a.rows + r);
      order[is_long ? --end : num_short++] = static_cast<uint8_t>(r);
    }
    a.num_short[g] = num_short;
  }
}

void linear_int8(const Activations& a, const PanelRange& range) { multiply_panels<Int8>(a, range); }
void linear_int4(const Activations& a, const PanelRange& range) { multiply_panels<Int4>(a, range); }

}  // namespace paceline::PACELINE_LEVEL
