// Attention over whole arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "team.h"

namespace paceline {

struct AttentionSpans {
  int count;
  const int32_t* starts;        // [count + 1]
  const int32_t* context_lens;  // [count]
  const int32_t* block_tables;  // [count, width]
  int64_t width;
};

// How the tokens of a batch are cut into tiles: the same for all layers of one window and one number of query heads to
// a key head.
struct AttentionPlan {
  struct Tile {
    int span, first, tokens;  // first: packed token
    int position;             // of the first token
    int64_t cost_before;      // of the tiles before this one
    int64_t cost;             // keys that the rows of one head visit
  };
  AttentionSpans spans;
  int group, window;
  std::vector<Tile> tiles;
  int64_t cost;  // of all tiles
};
AttentionPlan plan_attention(const AttentionSpans& spans, int group, int window);

// Fused rows -> [rows, num_q * head_dim]; key heads and tiles of tokens are shared by their cost.
void attention(const Team& team, const AttentionPlan& plan, const float* qkv, HeadShape heads, const KvView& kv,
               float scale, float softcap, float* out, uint8_t* scratch);
int64_t attention_scratch(HeadShape heads, int threads);

inline int64_t attention_work(const AttentionPlan& plan, HeadShape heads) {
  return plan.cost * heads.num_q * heads.head_dim / 8;
}

}  // namespace paceline
