// AMX: dots of sixteen cells and sixteen outputs at once, kept in tile registers. They are exact integers, so their
// bits are those of the vector dots.
#pragma once
#include "kernels.h"
#include "level.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {

#if defined(__AMX_INT8__)

constexpr int kTile = 16;           // most rows of a tile
constexpr int kFewestInTiles = 12;  // rows of a block with quantised weights; fewer are done sooner by vectors
inline bool in_tiles(int rows) { return rows >= kFewestInTiles; }

// While it lives the thread's tiles have these shapes: 0 holds the first 16 of a block's rows and 1 the others,
// `row_bytes` of each; 2 and 3 the weights that go with them, of two panels; 4 to 7 the products 0 x 2, 0 x 3, 1 x 2, 1
// x 3.
class TileShapes {
 public:
  TileShapes(int rows, int row_bytes) {
    const int first = rows < kTile ? rows : kTile;
    const int others = rows - first;
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool is_weights = tile == 2 || tile == 3, is_second = tile == 1 || tile > 5;
      shapes.rows[tile] = static_cast<uint8_t>(is_weights ? row_bytes / 4 : is_second ? others : first);
      shapes.row_bytes[tile] = static_cast<uint16_t>(shapes.rows[tile] == 0 ? 0 : tile < 2 ? row_bytes : 4 * kPanel);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  TileShapes(const TileShapes&) = delete;
  ~TileShapes() { asm volatile("tilerelease"); }
};

template <int Tile>
inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(Tile), "r"(rows), "r"(stride) : "memory");
}

template <int Tile>
inline void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(Tile), "r"(rows), "r"(stride) : "memory");
}

// Dots of int8 cells with int8 weights, or with uint8 ones.
template <int Dots, int Cells, int Weights, bool kUnsigned>
inline void form_tile() {
  if constexpr (kUnsigned) {
    asm volatile("tilezero %%tmm%c0\n\ttdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Dots), "i"(Cells), "i"(Weights));
  } else {
    asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Dots), "i"(Cells), "i"(Weights));
  }
}

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

// sums += the products of bfloat16 pairs. For pairs ascending, one sum of the first numbers' products and one of the
// second ones', each by fma; then both are added, and their sum to `sums`. Subnormal numbers are zero.
template <int Sums, int Rows, int Weights>
inline void add_bf16_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Weights));
}

// 64 bytes with two nibbles each: low and high ones, 16 times them, and them.
inline void spread_nibbles(const void* packed, void* sixteen_low, void* sixteen_high, void* low, void* high) {
  const __m512i both = _mm512_loadu_si512(packed), low_mask = _mm512_set1_epi8(15), high_mask = _mm512_set1_epi8(-16);
  _mm512_storeu_si512(sixteen_low, _mm512_and_si512(_mm512_slli_epi16(both, 4), high_mask));
  _mm512_storeu_si512(sixteen_high, _mm512_and_si512(both, high_mask));
  _mm512_storeu_si512(low, _mm512_and_si512(both, low_mask));
  _mm512_storeu_si512(high, _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask));
}

#else

inline bool in_tiles(int) { return false; }

#endif

}  // namespace paceline::PACELINE_LEVEL
