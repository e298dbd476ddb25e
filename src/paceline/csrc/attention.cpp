#include "attention.h"

#include <algorithm>

namespace paceline {
namespace {

int tile_tokens(int group) { return std::max(1, kAttentionTileRows / group); }

int64_t scratch_of_thread(int group, int head_dim) {
  return align(attention_floats(tile_tokens(group) * group, head_dim) * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

AttentionPlan plan_attention(const AttentionSpans& spans, int group, int window) {
  AttentionPlan plan{spans, group, window, {}, 0};
  for (int s = 0; s < spans.count; ++s) {
    for (int t = spans.starts[s]; t < spans.starts[s + 1]; t += tile_tokens(group)) {
      const int tokens = std::min(tile_tokens(group), spans.starts[s + 1] - t);
      const int position = spans.context_lens[s] + t - spans.starts[s];
      const int keys = window > 0 ? std::min(position + tokens, window + tokens) : position + tokens;
      const int64_t cost = static_cast<int64_t>(keys + kKeyTile) * tokens;
      plan.tiles.push_back({s, t, tokens, position, plan.cost, cost});
      plan.cost += cost;
    }
  }
  return plan;
}

int64_t attention_scratch(HeadShape heads, int threads) {
  return scratch_of_thread(heads.num_q / heads.num_kv, heads.head_dim) * threads;
}

void attention(const Team& team, const AttentionPlan& plan, const float* qkv, HeadShape heads, const KvView& kv,
               float scale, float softcap, float* out, uint8_t* scratch) {
  const int64_t stride = row_width(heads);
  const int64_t out_stride = static_cast<int64_t>(heads.num_q) * heads.head_dim;
  const int64_t head_offset = static_cast<int64_t>(plan.group) * heads.head_dim;
  // Items (tile, head), heads running fastest, for those of a block lie side by side. An item belongs to the thread in
  // whose share of the total cost it begins.
  const Share mine = team.share(plan.cost * heads.num_kv);
  auto tile =
      std::upper_bound(plan.tiles.begin(), plan.tiles.end(), mine.first / heads.num_kv,
                       [](int64_t value, const AttentionPlan::Tile& t) { return value < t.cost_before + t.cost; });
  for (; tile != plan.tiles.end() && tile->cost_before * heads.num_kv < mine.last; ++tile) {
    for (int head = 0; head < heads.num_kv; ++head) {
      const int64_t begin = tile->cost_before * heads.num_kv + head * tile->cost;
      if (begin < mine.first || begin >= mine.last) continue;
      AttentionTask task;
      task.queries = qkv + tile->first * stride + head * head_offset;
      task.query_stride = stride;
      task.out = out + tile->first * out_stride + head * head_offset;
      task.out_stride = out_stride;
      task.tokens = tile->tokens;
      task.group = plan.group;
      task.first_position = tile->position;
      task.blocks = plan.spans.block_tables + tile->span * plan.spans.width;
      task.data = kv.data + head * kv.head_stride;
      task.kv = &kv;
      task.scale = scale;
      task.softcap = softcap;
      task.window = plan.window;
      task.scratch = reinterpret_cast<float*>(scratch + scratch_of_thread(plan.group, heads.head_dim) * team.thread);
      team.kernels.attention(task);
    }
  }
}

}  // namespace paceline
