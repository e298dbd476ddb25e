// Causal attention over the paged store: one kernel for any number of query tokens.
//
// A row is one query head of one token; its keys are [low, high). The keys are visited in tiles of 64 and segments of
// 1024, both at absolute positions. For each row, whatever other rows share the pass:
//   tile:    score = fma chain over the head's elements, * scale, soft cap; new maximum m; p = e^(score - m);
//            sum (16 lanes) and accumulator are multiplied by e^(old m - m); then the p are added to the sum, and
//            accumulator = fma(p, value, accumulator) for the keys in ascending order
//   segment: starts from nothing, and merges into the row's result with e^(its m - larger m)
// A row never touches a tile in which it has no key, nor the value of a key outside its range.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

constexpr int kGroups = kKeyTile / kPanel;

// The state of one row, in the task's scratch.
struct Row {
  float* scores;       // [64], of the current tile; a vector before and after it may be written over
  float* accumulator;  // [width], of the current segment
  float* sums;         // [16]
  float* total;        // [width], of the segments before
  float* total_sums;   // [16]
  float maximum, total_maximum;
  const float* query;
  int low, high;  // keys of this row: absolute positions
};

static_assert(sizeof(Row) <= 16 * sizeof(float), "attention_floats leaves that much for it");

// Neighbouring keys that lie in one group of 16 of one block. `start` is the place of the group's first slot in the
// tile; it is negative where the group began before the tile.
struct Piece {
  int start, end;
  const uint16_t *keys, *values;
};

struct Tile {
  int start;
  int count;
  Piece pieces[kKeyTile];
};

// Scores of all slots of G pieces. Slots of the group outside the piece give numbers that the pieces after it write
// over, or that lie outside the rows' keys and are never looked at.
template <int R, int G>
inline void score_pieces(const Row* rows, const Piece* pieces, int head_dim) {
  F32x16 acc[R][G];
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) acc[r][g] = zero();
  }
  for (int d = 0; d < head_dim; d += 2) {
    F32x16 even[G], odd[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) load_bf16_pairs(pieces[g].keys + d * kPanel, even[g], odd[g]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const F32x16 qe = broadcast(rows[r].query[d]), qo = broadcast(rows[r].query[d + 1]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[r][g] = fma(even[g], qe, acc[r][g]);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) acc[r][g] = fma(odd[g], qo, acc[r][g]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) store(rows[r].scores + pieces[g].start, acc[r][g]);
  }
}

// Scores of the tile's keys first .. last - 1.
template <int R>
void score(const Row* rows, const Tile& tile, int head_dim, int first, int last) {
  int begin = 0, end = tile.count;
  while (tile.pieces[begin].end <= first) ++begin;
  while (tile.pieces[end - 1].start >= last) --end;
  for (; begin + kAttentionVectors <= end; begin += kAttentionVectors) {
    score_pieces<R, kAttentionVectors>(rows, tile.pieces + begin, head_dim);
  }
  for (; begin < end; ++begin) score_pieces<R, 1>(rows, tile.pieces + begin, head_dim);
}

// From scores to weights p, in place; the row's sums and accumulator take the new maximum.
void weigh(Row& row, int tile_start, int width, float scale, float softcap) {
  const int low = row.low > tile_start ? row.low - tile_start : 0;
  const int high = row.high - tile_start < kKeyTile ? row.high - tile_start : kKeyTile;
  const F32x16 none = broadcast(-infinity());
  F32x16 s[kGroups], largest = none;
  for (int g = low / kPanel; g * kPanel < high; ++g) {
    const int first = low > g * kPanel ? low - g * kPanel : 0;
    const int last = high - g * kPanel < kPanel ? high - g * kPanel : kPanel;
    F32x16 v = mul(load(row.scores + g * kPanel), broadcast(scale));
    if (softcap > 0.0f) v = mul(broadcast(softcap), tanh(div(v, broadcast(softcap))));
    s[g] = select(lanes_between(first, last), v, none);
    largest = max(largest, s[g]);
  }
  const float tile_maximum = reduce_max(largest);
  const float maximum = tile_maximum > row.maximum ? tile_maximum : row.maximum;
  F32x16 sums = load(row.sums);
  if (maximum > row.maximum) {
    const F32x16 factor = exp(broadcast(row.maximum - maximum));
    sums = mul(sums, factor);
    for (int d = 0; d < width; d += kLanes) store(row.accumulator + d, mul(load(row.accumulator + d), factor));
    row.maximum = maximum;
  }
  for (int g = low / kPanel; g * kPanel < high; ++g) {
    const F32x16 p = exp(sub(s[g], broadcast(maximum)));
    store(row.scores + g * kPanel, p);
    sums = add(sums, p);
  }
  store(row.sums, sums);
}

// accumulator += p * value over keys first .. last - 1 of the tile, for V vectors of the head from element `begin` on.
template <int R, int V>
inline void gather_values(const Row* rows, const Tile& tile, int width, int begin, int first, int last) {
  F32x16 acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = load(rows[r].accumulator + begin + v * kLanes);
  }
  for (const Piece* piece = tile.pieces; piece < tile.pieces + tile.count && piece->start < last; ++piece) {
    const int end = piece->end < last ? piece->end : last;
    for (int key = piece->start > first ? piece->start : first; key < end; ++key) {
      const uint16_t* value = piece->values + (key - piece->start) * width + begin;
      F32x16 x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v += 2) load_bf16_pairs(value + v * kLanes, x[v], x[v + 1]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const F32x16 p = broadcast(rows[r].scores[key]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = fma(x[v], p, acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(rows[r].accumulator + begin + v * kLanes, acc[r][v]);
  }
}

template <int R>
void gather(const Row* rows, const Tile& tile, int width, int first, int last) {
  if (first >= last) return;
  int d = 0;
  for (; d + kAttentionVectors * kLanes <= width; d += kAttentionVectors * kLanes) {
    gather_values<R, kAttentionVectors>(rows, tile, width, d, first, last);
  }
  for (; d < width; d += 2 * kLanes) gather_values<R, 2>(rows, tile, width, d, first, last);
}

// One tile for R rows that all have keys in it. What they have in common is done together.
template <int R>
void visit(Row* rows, const Tile& tile, const AttentionTask& task, int width) {
  int low[R], high[R];
  int first = kKeyTile, last = 0, common_first = 0, common_last = kKeyTile;
  for (int r = 0; r < R; ++r) {
    low[r] = rows[r].low > tile.start ? rows[r].low - tile.start : 0;
    high[r] = rows[r].high - tile.start < kKeyTile ? rows[r].high - tile.start : kKeyTile;
    first = low[r] < first ? low[r] : first;
    last = high[r] > last ? high[r] : last;
    common_first = low[r] > common_first ? low[r] : common_first;
    common_last = high[r] < common_last ? high[r] : common_last;
  }
  score<R>(rows, tile, task.kv->head_dim, first, last);
  for (int r = 0; r < R; ++r) weigh(rows[r], tile.start, width, task.scale, task.softcap);
  if (common_first >= common_last) {
    for (int r = 0; r < R; ++r) gather<1>(rows + r, tile, width, low[r], high[r]);
    return;
  }
  for (int r = 0; r < R; ++r) gather<1>(rows + r, tile, width, low[r], common_first);
  gather<R>(rows, tile, width, common_first, common_last);
  for (int r = 0; r < R; ++r) gather<1>(rows + r, tile, width, common_last, high[r]);
}

template <int R>
void visit_rows(Row* rows, int count, const Tile& tile, const AttentionTask& task, int width) {
  if (count == R) {
    visit<R>(rows, tile, task, width);
  } else if constexpr (R > 1) {
    visit_rows<R - 1>(rows, count, tile, task, width);
  }
}

bool has_keys(const Row& row, int start, int end) { return row.low < end && row.high > start; }

void begin_segment(Row& row, int width) {
  row.maximum = -infinity();
  store(row.sums, zero());
  for (int d = 0; d < width; d += kLanes) store(row.accumulator + d, zero());
}

void end_segment(Row& row, int segment, int width) {
  if (row.low >= segment * kKeySegment) {  // the row's first one
    row.total_maximum = row.maximum;
    store(row.total_sums, load(row.sums));
    for (int d = 0; d < width; d += kLanes) store(row.total + d, load(row.accumulator + d));
    return;
  }
  const float maximum = row.maximum > row.total_maximum ? row.maximum : row.total_maximum;
  const F32x16 old = exp(broadcast(row.total_maximum - maximum)), fresh = exp(broadcast(row.maximum - maximum));
  store(row.total_sums, fma(load(row.sums), fresh, mul(load(row.total_sums), old)));
  for (int d = 0; d < width; d += kLanes) {
    store(row.total + d, fma(load(row.accumulator + d), fresh, mul(load(row.total + d), old)));
  }
  row.total_maximum = maximum;
}

// The tile's keys from `first` on; none before is needed by any row, and none from `end` on exists.
void locate(const AttentionTask& task, int start, int first, int end, Tile& tile) {
  const KvView& kv = *task.kv;
  const int width = kv.value_width();
  const int stop = end < start + kKeyTile ? end : start + kKeyTile;
  tile.start = start;
  tile.count = 0;
  for (int position = first > start ? first : start; position < stop;) {
    const int slot = position % kv.block_size;
    const int group = slot / kPanel * kPanel;
    const int group_end = group + kPanel < kv.block_size ? group + kPanel : kv.block_size;
    const uint16_t* head = task.data + task.blocks[position / kv.block_size] * kv.block_stride;
    Piece& piece = tile.pieces[tile.count++];
    piece.start = position - (slot - group) - start;
    piece.end = position + (group_end - slot) - start;
    piece.keys = head + static_cast<int64_t>(group) * kv.head_dim;
    piece.values = head + kv.keys_size() + static_cast<int64_t>(group) * width;
    position += group_end - slot;
  }
}

}  // namespace

void attention(const AttentionTask& task) {
  const int width = task.kv->value_width();
  const int head_dim = task.kv->head_dim;
  const int count = task.tokens * task.group;
  const int64_t floats = kKeyTile + 2 * width + 4 * kLanes;
  Row* rows = reinterpret_cast<Row*>(task.scratch + floats * count);
  for (int i = 0; i < count; ++i) {
    Row& row = rows[i];
    float* p = task.scratch + floats * i;
    row.scores = p + kLanes;
    row.accumulator = row.scores + kKeyTile + kLanes;
    row.total = row.accumulator + width;
    row.sums = row.total + width;
    row.total_sums = row.sums + kLanes;
    const int token = i / task.group;
    row.query = task.queries + token * task.query_stride + i % task.group * head_dim;
    row.high = task.first_position + token + 1;
    row.low = task.window > 0 && row.high > task.window ? row.high - task.window : 0;
  }
  const int low = rows[0].low, high = rows[count - 1].high;
  Tile tile;
  for (int segment = low / kKeySegment; segment * kKeySegment < high; ++segment) {
    const int segment_start = segment * kKeySegment;
    const int segment_end = segment_start + kKeySegment < high ? segment_start + kKeySegment : high;
    for (int i = 0; i < count; ++i) begin_segment(rows[i], width);
    int start = segment_start > low ? segment_start : low / kKeyTile * kKeyTile;
    for (; start < segment_end; start += kKeyTile) {
      locate(task, start, low, high, tile);
      // Rows with keys in this tile are neighbours: those from the first whose range reaches it to the last.
      int i = 0, end = count;
      while (i < count && !has_keys(rows[i], start, start + kKeyTile)) ++i;
      while (end > i && !has_keys(rows[end - 1], start, start + kKeyTile)) --end;
      for (; i < end; i += kAttentionRows) {
        visit_rows<kAttentionRows>(rows + i, end - i < kAttentionRows ? end - i : kAttentionRows, tile, task, width);
      }
    }
    for (int i = 0; i < count; ++i) {
      if (has_keys(rows[i], segment_start, segment_end)) end_segment(rows[i], segment, width);
    }
  }
  for (int i = 0; i < count; ++i) {
    const Row& row = rows[i];
    const F32x16 sum = broadcast(reduce_add(load(row.total_sums)));
    float* out = task.out + i / task.group * task.out_stride + i % task.group * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      const int n = head_dim - d < kLanes ? head_dim - d : kLanes;
      store_first(out + d, div(load(row.total + d), sum), n);
    }
  }
}

}  // namespace paceline::PACELINE_LEVEL
