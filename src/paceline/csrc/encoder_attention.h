// Attention within segments of packed rows, over whole arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "team.h"

namespace paceline {

// How segments are cut into tiles of rows: the same for all heads and layers.
struct EncoderPlan {
  struct Tile {
    int32_t start, length;  // of the segment
    int32_t first, rows;
    int64_t cost_before;  // of the tiles before this one
  };
  std::vector<Tile> tiles;
  int64_t cost = 0;  // keys that all rows of one head visit
  int32_t longest = 0;
};
// Segment s has the rows starts[s] .. starts[s + 1] - 1.
EncoderPlan plan_encoder_attention(const int32_t* starts, int64_t segments);

// Fused rows -> [rows, num_q * head_dim]; heads and tiles are shared by their cost.
void encoder_attention(const Team& team, const EncoderPlan& plan, const float* qkv, HeadShape heads, float scale,
                       float softcap, float* out, uint8_t* scratch);
int64_t encoder_attention_scratch(const EncoderPlan& plan, HeadShape heads, int threads);

inline int64_t encoder_attention_work(const EncoderPlan& plan, HeadShape heads) {
  return plan.cost * heads.num_q * heads.head_dim / 8;
}

}  // namespace paceline
