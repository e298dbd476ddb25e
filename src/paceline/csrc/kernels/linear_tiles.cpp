// Quantised linear layers of many rows in AMX's tiles. Sums are those of linear_quantized.cpp, in its order.
//
// A cell has both digits of its quants side by side, [32 high][32 low]. Nibble weights, which leave room for it, are
// there twice, [16 * weight][weight], so that one tile operation forms whole dots; of int8 weights it forms those of
// either digit.
//
// Vectors run at half their speed for a while after any instruction on tiles. So the two take turns: tiles form the
// dots of a few groups, then vectors scale and add them.
#include "level_kernels.h"
#include "simd.h"
#include "store_panel.h"
#include "tiles.h"

#if defined(__AMX_INT8__)

namespace paceline::PACELINE_LEVEL {
namespace {

constexpr int kTurnGroups = 3;  // most groups of a turn: their dots stay in the nearest cache
constexpr int kPanels = 2;
constexpr int kCell = 2 * kGroup;  // bytes

using Dots = int32_t[kBlockRows][kPanel];

struct Int8 {
  using Group = Int8Group;
  using Bytes = int8_t[kPanels][kGroup / 4][kPanel][4];
  static constexpr bool kHasMinima = false, kTogether = false;
  static const void* bytes(const Group& group, Bytes&, int) { return group.quants; }
};

struct Int4 {
  using Group = Int4Group;
  using Bytes = uint8_t[kPanels][kCell / 4][kPanel][4];
  static constexpr bool kHasMinima = true, kTogether = true;
  static const void* bytes(const Group& group, Bytes& room, int panel) {
    for (int s = 0; s < kGroup / 8; ++s) {
      uint8_t (*high)[kPanel][4] = room[panel] + s, (*low)[kPanel][4] = high + kGroup / 4;
      spread_nibbles(group.quants[s], high[0], high[kGroup / 8], low[0], low[kGroup / 8]);
    }
    return room[panel];
  }
};

// Dots of all cells with a group of two panels; a tile is stored while the next one is formed.
template <bool kUnsigned>
inline void form_dots(const int8_t* cells, int rows, const void* const (&weights)[kPanels], Dots (&dots)[kPanels]) {
  constexpr int64_t kWeightRow = 4 * kPanel, kDotRow = sizeof dots[0][0];
  load_tile<0>(cells, kCell);
  load_tile<2>(weights[0], kWeightRow);
  form_tile<4, 0, 2, kUnsigned>();
  load_tile<3>(weights[1], kWeightRow);
  form_tile<5, 0, 3, kUnsigned>();
  store_tile<4>(dots[0], kDotRow);
  if (rows > kTile) {
    load_tile<1>(cells + kTile * kCell, kCell);
    form_tile<6, 1, 2, kUnsigned>();
    store_tile<5>(dots[1], kDotRow);
    form_tile<7, 1, 3, kUnsigned>();
    store_tile<6>(dots[0] + kTile, kDotRow);
    store_tile<7>(dots[1] + kTile, kDotRow);
  } else {
    store_tile<5>(dots[1], kDotRow);
  }
}

// What a turn works on.
template <class Form>
struct Turn {
  int first, last;  // groups
  alignas(64) Dots dots[kTurnGroups][kPanels], high_dots[Form::kTogether ? 1 : kTurnGroups][kPanels];
  alignas(64) typename Form::Bytes bytes[kTurnGroups];
};

template <class Form>
void form_turn(const Activations& a, const typename Form::Group* const (&w)[kPanels], Turn<Form>& turn) {
  const void* weights[kTurnGroups][kPanels];
  for (int g = turn.first; g < turn.last; ++g) {
    for (int p = 0; p < kPanels; ++p) {
      prefetch<sizeof(typename Form::Group)>(w[p] + g);
      weights[g - turn.first][p] = Form::bytes(w[p][g], turn.bytes[g - turn.first], p);
    }
  }
  const auto any_long = [&](int g) { return a.num_short[g] < a.rows; };
  for (int g = turn.first; g < turn.last; ++g) {
    const int i = g - turn.first;
    const int8_t* cells = a.both + static_cast<int64_t>(g) * a.rows * kCell;
    if constexpr (Form::kTogether) {
      form_dots<true>(cells, a.rows, weights[i], turn.dots[i]);
    } else {
      form_dots<false>(cells + kGroup, a.rows, weights[i], turn.dots[i]);
      if (any_long(g)) form_dots<false>(cells, a.rows, weights[i], turn.high_dots[i]);
    }
  }
  if constexpr (!Form::kTogether) {
    for (int g = turn.first; g < turn.last; ++g) {
      if (!any_long(g)) continue;
      for (int p = 0; p < kPanels; ++p) {
        for (int r = 0; r < a.rows; ++r) {
          int32_t* dot = turn.dots[g - turn.first][p][r];
          store_i32(dot, add(load_i32(dot), times_16(load_i32(turn.high_dots[g - turn.first][p][r]))));
        }
      }
    }
  }
}

// The turn's dots of rows row .. row + R - 1 and panel p, scaled, go to their sums.
template <class Form, int R>
inline void add_dots(const Activations& a, const typename Form::Group* w, const Turn<Form>& turn, int p, int row,
                     float (*sums)[kPanel]) {
  F32x16 acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = load(sums[row + r]);
  for (int g = turn.first; g < turn.last; ++g) {
    const F32x16 weight_scale = load_f16(w[g].scales);
    F32x16 minimum;
    if constexpr (Form::kHasMinima) minimum = load_f16(w[g].minima);
    const int64_t at = static_cast<int64_t>(g) * a.rows + row;
    const int i = g - turn.first;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 dot = to_f32(load_i32(turn.dots[i][p][row + r]));
      acc[r] = fma(mul(dot, broadcast(a.scales[at + r])), weight_scale, acc[r]);
      if constexpr (Form::kHasMinima) acc[r] = fma(minimum, broadcast(a.scaled_sums[at + r]), acc[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(sums[row + r], acc[r]);
}

// The rows from `row` on, R at a time, then half as many.
template <class Form, int R>
inline void add_turn(const Activations& a, const typename Form::Group* w, const Turn<Form>& turn, int p, int row,
                     float (*sums)[kPanel]) {
  for (; row + R <= a.rows; row += R) add_dots<Form, R>(a, w, turn, p, row, sums);
  if constexpr (R > 1) add_turn<Form, R / 2>(a, w, turn, p, row, sums);
}

template <class Form>
void multiply(const Activations& a, const PanelRange& range, int first_panel) {
  // The last one of an odd number of panels is multiplied twice.
  const int panels = range.panels - first_panel < kPanels ? 1 : kPanels;
  const typename Form::Group* w[kPanels];
  alignas(64) float sums[kPanels][kBlockRows][kPanel];
  for (int p = 0; p < kPanels; ++p) {
    w[p] = reinterpret_cast<const typename Form::Group*>(static_cast<const char*>(range.weights) +
                                                         (first_panel + p % panels) * range.panel_bytes);
    for (int r = 0; r < a.rows; ++r) store(sums[p][r], zero());
  }
  const int turns = (a.groups + kTurnGroups - 1) / kTurnGroups;
  Turn<Form> turn;
  for (int t = 0; t < turns; ++t) {
    turn.first = a.groups * t / turns;
    turn.last = a.groups * (t + 1) / turns;
    form_turn(a, w, turn);
    for (int p = 0; p < panels; ++p) add_turn<Form, kTile>(a, w[p], turn, p, 0, sums[p]);
  }
  for (int p = 0; p < panels; ++p) store_panel(sums[p][0], kPanel, a.rows, range, first_panel + p);
}

template <class Form>
void multiply_panels(const Activations& a, const PanelRange& range) {
  const TileShapes shapes(a.rows, Form::kTogether ? kCell : kGroup);
  for (int panel = 0; panel < range.panels; panel += kPanels) multiply<Form>(a, range, panel);
}

}  // namespace

void linear_int8_in_tiles(const Activations& a, const PanelRange& range) { multiply_panels<Int8>(a, range); }
void linear_int4_in_tiles(const Activations& a, const PanelRange& range) { multiply_panels<Int4>(a, range); }

}  // namespace paceline::PACELINE_LEVEL
#endif
