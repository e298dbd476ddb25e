// Linear layers with int8 and int4 weights in groups of 32, and the activations that go with them.
//
// For each output: for g ascending, acc = fma(dot * row scale, weight scale, acc), the dot being exact; with minima
// then acc = fma(weight minimum, row scale * sum of the row's quants, acc).
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"
#include "store_panel.h"
#include "tiles.h"

namespace paceline::PACELINE_LEVEL {
namespace {

// A group has 12 bits if its largest magnitude exceeds this many times the row's root mean square. Rounding to 8 bits
// then costs no group more than one in 110 of that mean.
constexpr float kLongAbove = 4.0f;
constexpr float kLargestShort = 127.0f, kLargestLong = 127.0f * 16.0f;

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

// The numbers of a group, and zeros after the last input.
struct Numbers {
  F32x16 halves[2];
  Numbers(const float* x, int count)
      : halves{load_first(x, count < kLanes ? count : kLanes),
               count > kLanes ? load_first(x + kLanes, count - kLanes) : zero()} {}
  // The largest magnitude; as integers NaN is largest.
  float largest() const {
    const int32_t bits = reduce_max(max(as_i32(absolute(halves[0])), as_i32(absolute(halves[1]))));
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// Scale = largest magnitude / largest quant, quants rounded to nearest even. A group with an infinity or a NaN gets a
// NaN scale, so that it spoils its own row and no other; one below 2^-100 counts as zero.
template <bool kLong>
void quantize_group(const Numbers& x, float largest, const Activations& a, int64_t at) {
  constexpr float kLargest = kLong ? kLargestLong : kLargestShort;
  const bool finite = largest < infinity(), zeros = !(finite && largest >= 0x1p-100f);
  const F32x16 inverse = broadcast(zeros ? 0.0f : kLargest / largest);
  I32x16 high_sums = broadcast_i32(0), low_sums = broadcast_i32(0);
  for (int half = 0; half < 2; ++half) {
    const int64_t offset = at * kGroup + half * kLanes;
    const I32x16 q = zeros ? broadcast_i32(0) : round_to_i32(mul(x.halves[half], inverse));
    I32x16 high = q, low = broadcast_i32(0);
    if constexpr (kLong) {
      high = round_to_i32(mul(to_f32(q), broadcast(1.0f / 16.0f)));
      low = sub(q, times_16(high));
      low_sums = add(low_sums, low);
    }
    high_sums = add(high_sums, high);
    if (in_tiles(a.rows)) {
      int8_t* cell = a.both + 2 * at * kGroup + half * kLanes;
      store_i8(cell, kLong ? high : low);
      store_i8(cell + kGroup, kLong ? low : high);
      continue;
    }
    store_i8(a.high + offset, high);
    if constexpr (kLong) store_i8(a.low + offset, low);
    if constexpr (kByteDotsOfWords) store_words(a.words + offset, q);
  }
  const int32_t high_sum = reduce_add(high_sums), low_sum = kLong ? reduce_add(low_sums) : 0;
  const float scale = finite ? (zeros ? 0.0f : largest / kLargest) : __builtin_nanf("");
  a.scales[at] = scale;
  a.scaled_sums[at] = scale * static_cast<float>(kLong ? 16 * high_sum + low_sum : high_sum);
  a.high_sums[at] = high_sum;
  a.low_sums[at] = low_sum;
}

struct Int8 {
  using Group = Int8Group;
  using Weights = ByteWeights;
  static constexpr bool kHasMinima = false;
  static constexpr int kRows = kByteRows, kPanels = kBytePanels;
  template <bool kLong, int R, int P>
  static inline void dots(const Weights (&w)[P], const Activations& a, int64_t at, I32x16 (&dot)[R][P]) {
    byte_dots<kLong>(w, a, at, dot);
  }
};

struct Int4 {
  using Group = Int4Group;
  using Weights = NibbleWeights;
  static constexpr bool kHasMinima = true;
  static constexpr int kRows = kNibbleRows, kPanels = kNibblePanels;
  template <bool kLong, int R, int P>
  static inline void dots(const Weights (&w)[P], const Activations& a, int64_t at, I32x16 (&dot)[R][P]) {
    nibble_dots(w, a.high + at * kGroup, dot);
    if constexpr (kLong) {
      I32x16 low[R][P];
      nibble_dots(w, a.low + at * kGroup, low);
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) dot[r][p] = add(times_16(dot[r][p]), low[r][p]);
      }
    }
  }
};

template <int P>
using Accumulators = float[kBlockRows][P][kLanes];

// A group's weights, made ready once for all rows of the block.
template <class Form, int P>
struct GroupWeights {
  typename Form::Weights quants[P];
  F32x16 scales[P], minima[P];

  void load(const typename Form::Group* const (&w)[P], int g) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      prefetch<sizeof(typename Form::Group)>(w[p] + g);
      quants[p].load(w[p][g].quants);
      scales[p] = load_f16(w[p][g].scales);
      if constexpr (Form::kHasMinima) minima[p] = load_f16(w[p][g].minima);
    }
  }
};

// The group's cells first .. last - 1, R at a time, then half as many for those that are left.
template <class Form, bool kLong, int R, int P>
inline void add_cells(const GroupWeights<Form, P>& w, const Activations& a, int g, int first, int last,
                      Accumulators<P>& acc) {
  const int64_t group = static_cast<int64_t>(g) * a.rows;
  int i = first;
  for (; i + R <= last; i += R) {
    const int64_t at = group + i;
    I32x16 dot[R][P];
    Form::template dots<kLong>(w.quants, a, at, dot);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 scale = broadcast(a.scales[at + r]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        float* sums = acc[a.order[at + r]][p];
        F32x16 sum = fma(mul(to_f32(dot[r][p]), scale), w.scales[p], PACELINE_LEVEL::load(sums));
        if constexpr (Form::kHasMinima) sum = fma(w.minima[p], broadcast(a.scaled_sums[at + r]), sum);
        store(sums, sum);
      }
    }
  }
  if constexpr (R > 1) add_cells<Form, kLong, R / 2>(w, a, g, i, last, acc);
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
    add_cells<Form, false, Form::kRows>(weights, a, g, 0, a.num_short[g], acc);
    add_cells<Form, true, Form::kRows>(weights, a, g, a.num_short[g], a.rows, acc);
  }
  for (int p = 0; p < P; ++p) store_panel(acc[0][p], P * kPanel, a.rows, range, first_panel + p);
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
    const int64_t cells = static_cast<int64_t>(g) * a.rows;
    int num_short = 0, num_long = 0;
    for (int r = 0; r < a.rows; ++r) {
      const Numbers numbers(x + r * stride + first, count);
      const float largest = numbers.largest();
      const bool is_long = largest >= 0x1p-100f && largest < infinity() && largest > thresholds[r];
      // In tiles the rows keep their order.
      const int place = is_long ? a.rows - ++num_long : num_short++;
      const int64_t at = cells + (in_tiles(a.rows) ? r : place);
      a.order[at] = static_cast<uint8_t>(r);
      if (is_long) {
        quantize_group<true>(numbers, largest, a, at);
      } else {
        quantize_group<false>(numbers, largest, a, at);
      }
    }
    a.num_short[g] = num_short;
  }
}

void linear_int8(const Activations& a, const PanelRange& range) {
#if defined(__AMX_INT8__)
  if (in_tiles(a.rows)) return linear_int8_in_tiles(a, range);
#endif
  multiply_panels<Int8>(a, range);
}

void linear_int4(const Activations& a, const PanelRange& range) {
#if defined(__AMX_INT8__)
  if (in_tiles(a.rows)) return linear_int4_in_tiles(a, range);
#endif
  multiply_panels<Int4>(a, range);
}

}  // namespace paceline::PACELINE_LEVEL
