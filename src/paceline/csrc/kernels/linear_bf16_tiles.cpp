// Linear layers with bfloat16 weights in AMX's tiles, for any number of rows.
//
// For each 32 inputs ascending: acc = acc + the tile's sum of them (tiles.h); the inputs that are left over are one
// more, narrower tile. The bias is added last.
#include "level_kernels.h"
#include "simd.h"
#include "store_panel.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace paceline::PACELINE_LEVEL {
namespace {

constexpr int kPanels = 2;
constexpr int kInputs = 32;  // of a whole tile

using Sums = float[kPanels][kBlockRows][kPanel];

// Two panels and the rows that they are multiplied with.
struct Pair {
  const uint16_t* w[kPanels];
  const uint16_t* x;
  int64_t stride;
  int rows;
};

inline void add_tiles(const Pair& pair, int first, int last) {
  const int64_t row_bytes = pair.stride * static_cast<int64_t>(sizeof(uint16_t));
  for (int k = first; k < last; k += kInputs) {
    for (int p = 0; p < kPanels; ++p) prefetch<kInputs * kPanel * sizeof(uint16_t)>(pair.w[p] + k * kPanel);
    load_tile<0>(pair.x + k, row_bytes);
    load_tile<2>(pair.w[0] + k * kPanel, 4 * kPanel);
    add_bf16_tile<4, 0, 2>();
    load_tile<3>(pair.w[1] + k * kPanel, 4 * kPanel);
    add_bf16_tile<5, 0, 3>();
    if (pair.rows <= kTile) continue;
    load_tile<1>(pair.x + kTile * pair.stride + k, row_bytes);
    add_bf16_tile<6, 1, 2>();
    add_bf16_tile<7, 1, 3>();
  }
}

inline void zero_tiles(int rows) {
  zero_tile<4>();
  zero_tile<5>();
  if (rows <= kTile) return;
  zero_tile<6>();
  zero_tile<7>();
}

inline void store_tiles(Sums& sums, int rows) {
  store_tile<4>(sums[0], 4 * kPanel);
  store_tile<5>(sums[1], 4 * kPanel);
  if (rows <= kTile) return;
  store_tile<6>(sums[0] + kTile, 4 * kPanel);
  store_tile<7>(sums[1] + kTile, 4 * kPanel);
}

inline void load_tiles(const Sums& sums, int rows) {
  load_tile<4>(sums[0], 4 * kPanel);
  load_tile<5>(sums[1], 4 * kPanel);
  if (rows <= kTile) return;
  load_tile<6>(sums[0] + kTile, 4 * kPanel);
  load_tile<7>(sums[1] + kTile, 4 * kPanel);
}

}  // namespace

void linear_bf16(const uint16_t* x, int64_t stride, int rows, int inputs, const PanelRange& range) {
  const int whole = inputs / kInputs * kInputs;
  const int padded = (inputs + 1) / 2 * 2;
  alignas(64) Sums sums;
  const auto each_pair = [&](auto multiply) {
    for (int panel = 0; panel < range.panels; panel += kPanels) {
      // The last one of an odd number of panels is multiplied twice.
      const int panels = range.panels - panel < kPanels ? 1 : kPanels;
      Pair pair{{}, x, stride, rows};
      for (int p = 0; p < kPanels; ++p) {
        pair.w[p] = reinterpret_cast<const uint16_t*>(static_cast<const char*>(range.weights) +
                                                      (panel + p % panels) * range.panel_bytes);
      }
      multiply(pair);
      for (int p = 0; p < panels; ++p) store_panel(sums[p][0], kPanel, rows, range, panel + p);
    }
  };
  if (whole == padded) {
    const TileShapes shapes(rows, kInputs * sizeof(uint16_t));
    return each_pair([&](const Pair& pair) {
      zero_tiles(rows);
      add_tiles(pair, 0, whole);
      store_tiles(sums, rows);
    });
  }
  each_pair([&](const Pair& pair) {
    {
      const TileShapes shapes(rows, kInputs * sizeof(uint16_t));
      zero_tiles(rows);
      add_tiles(pair, 0, whole);
      store_tiles(sums, rows);
    }
    const TileShapes narrow(rows, (padded - whole) * sizeof(uint16_t));
    load_tiles(sums, rows);
    add_tiles(pair, whole, padded);
    store_tiles(sums, rows);
  });
}

}  // namespace paceline::PACELINE_LEVEL
#endif
