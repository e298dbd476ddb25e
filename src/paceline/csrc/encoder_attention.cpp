#include "encoder_attention.h"

#include <algorithm>

namespace paceline {
namespace {

// A thread's memory: the keys and values of a segment as its kernels read them, and what the kernels need.
struct Workspace {
  float *keys, *values, *scratch;
  int64_t bytes = 0;

  Workspace(uint8_t* memory, int64_t longest, int head_dim) {
    const auto take = [&](float*& array, int64_t count) {
      array = reinterpret_cast<float*>(memory + bytes);
      bytes += align(count * static_cast<int64_t>(sizeof(float)));
    };
    const int64_t count = (longest + kKeyTile - 1) / kKeyTile * kKeyTile;
    take(keys, count * head_dim);
    take(values, count * ((head_dim + kPanel - 1) / kPanel * kPanel));
    take(scratch, encoder_attention_floats(head_dim));
  }
};

}  // namespace

EncoderPlan plan_encoder_attention(const int32_t* starts, int64_t segments) {
  EncoderPlan plan;
  for (int64_t s = 0; s < segments; ++s) {
    const int32_t length = starts[s + 1] - starts[s];
    plan.longest = std::max(plan.longest, length);
    for (int32_t first = starts[s]; first < starts[s + 1]; first += kEncoderRows) {
      const int32_t rows = std::min(kEncoderRows, starts[s + 1] - first);
      plan.tiles.push_back({starts[s], length, first, rows, plan.cost});
      plan.cost += static_cast<int64_t>(rows) * (length + kKeyTile);
    }
  }
  return plan;
}

int64_t encoder_attention_scratch(const EncoderPlan& plan, HeadShape heads, int threads) {
  return Workspace(nullptr, plan.longest, heads.head_dim).bytes * threads;
}

void encoder_attention(const Team& team, const EncoderPlan& plan, const float* qkv, HeadShape heads, float scale,
                       float softcap, float* out, uint8_t* scratch) {
  const int64_t stride = row_width(heads), out_stride = static_cast<int64_t>(heads.num_q) * heads.head_dim;
  const int64_t bytes = encoder_attention_scratch(plan, heads, 1);
  const Workspace space(scratch + bytes * team.thread, plan.longest, heads.head_dim);
  // Item i of the line [head][tile] belongs to the thread in whose share of the total cost it begins. A thread packs
  // the keys and values of each segment that it meets.
  const Share mine = team.share(plan.cost * heads.num_q);
  for (int head = 0; head < heads.num_q; ++head) {
    const int64_t offset = plan.cost * head;
    if (offset >= mine.last || offset + plan.cost <= mine.first) continue;
    auto tile = std::lower_bound(plan.tiles.begin(), plan.tiles.end(), mine.first - offset,
                                 [](const EncoderPlan::Tile& t, int64_t value) { return t.cost_before < value; });
    int32_t packed = -1;
    for (; tile != plan.tiles.end() && offset + tile->cost_before < mine.last; ++tile) {
      if (packed != tile->start) {
        const int key_head = heads.num_q + head / (heads.num_q / heads.num_kv);
        const float* keys = qkv + tile->start * stride + static_cast<int64_t>(key_head) * heads.head_dim;
        team.kernels.pack_segment(keys, keys + static_cast<int64_t>(heads.num_kv) * heads.head_dim, stride,
                                  tile->length, heads.head_dim, space.keys, space.values);
        packed = tile->start;
      }
      EncoderTask task;
      task.queries = qkv + tile->first * stride + static_cast<int64_t>(head) * heads.head_dim;
      task.query_stride = stride;
      task.out = out + tile->first * out_stride + static_cast<int64_t>(head) * heads.head_dim;
      task.out_stride = out_stride;
      task.rows = tile->rows;
      task.keys = tile->length;
      task.packed_keys = space.keys;
      task.packed_values = space.values;
      task.head_dim = heads.head_dim;
      task.scale = scale;
      task.softcap = softcap;
      task.scratch = space.scratch;
      team.kernels.encoder_attention(task);
    }
  }
}

}  // namespace paceline
