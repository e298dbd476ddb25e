// Causal attention over the paged store: one kernel for any number of query tokens.
//
// A row is one query head of one token; its keys are [low, high). The keys are visited in tiles of 64 and segments of
// 1024, both at absolute positions. For each row, whatever other rows share the pass:
//   tile:    score = fma chain over the head's elements, * scale, soft cap; new maximum m; p = e^(score - m);
//            sum (16 lanes) and accumulator are multiplied by e^(old m - m); then the p are added to the sum, and
//            accumulator = fma(p, value, accumulator) for the keys in ascending order
//   segment: starts from nothing, and merges into the row's result with e^(its m - larger m)
// A row never touches a tile in which it has no key, nor the value of a key outside its range.
#include "level_kernels.h"
#include "products.h"

namespace paceline::PACELINE_LEVEL {
namespace {

constexpr int kGroups = kKeyTile / kPanel;
constexpr int kScoreStride = kKeyTile + 2 * kPanel;  // a panel before and after a row's scores may be written over

// The rows of a task and their state, in its scratch memory.
struct Rows {
  int count, group, head_dim, width;
  int first_position, window;
  float* queries;       // [head_dim]
  float* scores;        // [64], of the current tile
  float* accumulators;  // [width], of the current segment
  float* totals;        // [width], of the segments before
  float* sums;          // [16]
  float* total_sums;    // [16]
  float *maxima, *total_maxima;

  Rows(const AttentionTask& task)
      : count(task.tokens * task.group),
        group(task.group),
        head_dim(task.kv->head_dim),
        width(task.kv->value_width()),
        first_position(task.first_position),
        window(task.window) {
    auto take = [next = task.scratch, this](int64_t floats) mutable {
      float* array = next;
      next += floats * count;
      return array;
    };
    scores = take(kScoreStride) + kPanel;
    accumulators = take(width);
    totals = take(width);
    sums = take(kLanes);
    total_sums = take(kLanes);
    queries = take(head_dim);
    maxima = take(1);
    total_maxima = take(1);
    for (int i = 0; i < count; ++i) {
      const float* query = task.queries + i / group * task.query_stride + i % group * head_dim;
      __builtin_memcpy(queries + i * head_dim, query, head_dim * sizeof(float));
    }
  }
  // The row's keys, as absolute positions.
  int high(int i) const { return first_position + i / group + 1; }
  int low(int i) const { return window > 0 && high(i) > window ? high(i) - window : 0; }
};

// Neighbouring keys that lie in one group of 16 of one block. `start` is the place of the group's first slot in the
// tile; it is negative where the group began before the tile.
struct Piece {
  int start, end;
  const uint16_t *keys, *values;  // the group's panel of keys, and its part of the first panel of values
};

struct Tile {
  int start;
  int count;
  Piece pieces[kKeyTile];

  // Places in the tile.
  int first(int low) const { return low > start ? low - start : 0; }
  int last(int high) const { return high - start < kKeyTile ? high - start : kKeyTile; }
};

// Scores of all slots of P pieces. Slots of the group outside the piece give numbers that the pieces after it write
// over, or that lie outside the rows' keys and are never looked at.
template <int R, int P>
inline void score_pieces(const Rows& rows, int i, const Piece* pieces) {
  const uint16_t* keys[P];
  F32x16 acc[R][P];
  for (int p = 0; p < P; ++p) {
    keys[p] = pieces[p].keys;
    for (int r = 0; r < R; ++r) acc[r][p] = zero();
  }
  add_products<BFloat16>(keys, rows.queries + i * rows.head_dim, rows.head_dim, rows.head_dim, acc);
  for (int p = 0; p < P; ++p) {
    for (int r = 0; r < R; ++r) store(rows.scores + (i + r) * kScoreStride + pieces[p].start, acc[r][p]);
  }
}

// Scores of the tile's keys first .. last - 1.
template <int R>
void score(const Rows& rows, int i, const Tile& tile, int first, int last) {
  constexpr int P = panels_at_once(R);
  int begin = 0, end = tile.count;
  while (tile.pieces[begin].end <= first) ++begin;
  while (tile.pieces[end - 1].start >= last) --end;
  for (; begin + P <= end; begin += P) score_pieces<R, P>(rows, i, tile.pieces + begin);
  for (; begin < end; ++begin) score_pieces<R, 1>(rows, i, tile.pieces + begin);
}

// From scores to weights p, in place; the row's sums and accumulator take the new maximum.
void weigh(const Rows& rows, int i, int first, int last, float scale, float softcap) {
  float* scores = rows.scores + i * kScoreStride;
  float* sums_of_row = rows.sums + i * kLanes;
  const F32x16 none = broadcast(-infinity());
  F32x16 s[kGroups], largest = none;
  for (int g = first / kPanel; g * kPanel < last; ++g) {
    F32x16 v = mul(load(scores + g * kPanel), broadcast(scale));
    if (softcap > 0.0f) v = mul(broadcast(softcap), tanh(div(v, broadcast(softcap))));
    if (first > g * kPanel || last < (g + 1) * kPanel) {
      const int from = first > g * kPanel ? first - g * kPanel : 0;
      const int to = last - g * kPanel < kPanel ? last - g * kPanel : kPanel;
      v = select(lanes_between(from, to), v, none);
    }
    s[g] = v;
    largest = max(largest, v);
  }
  const float tile_maximum = reduce_max(largest), old_maximum = rows.maxima[i];
  const float maximum = tile_maximum > old_maximum ? tile_maximum : old_maximum;
  F32x16 sums = load(sums_of_row);
  if (maximum > old_maximum) {
    const F32x16 factor = exp(broadcast(old_maximum - maximum));
    float* accumulator = rows.accumulators + static_cast<int64_t>(i) * rows.width;
    sums = mul(sums, factor);
    for (int d = 0; d < rows.width; d += kLanes) store(accumulator + d, mul(load(accumulator + d), factor));
    rows.maxima[i] = maximum;
  }
  for (int g = first / kPanel; g * kPanel < last; ++g) {
    const F32x16 p = exp(sub(s[g], broadcast(maximum)));
    store(scores + g * kPanel, p);
    sums = add(sums, p);
  }
  store(sums_of_row, sums);
}

// accumulator += p * value over keys first .. last - 1 of the tile, for P panels of the head from `panel` on.
template <int R, int P>
inline void gather_panels(const Rows& rows, int i, const Tile& tile, int64_t value_panel, int panel, int first,
                          int last) {
  float* accumulators = rows.accumulators + static_cast<int64_t>(i) * rows.width + panel * kPanel;
  F32x16 acc[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) acc[r][p] = load(accumulators + r * rows.width + p * kPanel);
  }
  for (const Piece* piece = tile.pieces; piece < tile.pieces + tile.count && piece->start < last; ++piece) {
    const int end = piece->end < last ? piece->end : last;
    int key = piece->start > first ? piece->start : first;
    if (key >= end) continue;
    const uint16_t* values[P];
    for (int p = 0; p < P; ++p) values[p] = piece->values + (panel + p) * value_panel + (key - piece->start) * kPanel;
    const float* weights = rows.scores + i * kScoreStride;
    if ((key - piece->start) % 2 == 1) {  // the second key of a pair, whose first one is not wanted
      for (int p = 0; p < P; ++p) {
        F32x16 unwanted, value;
        BFloat16::pair(values[p] - kPanel, unwanted, value);
        for (int r = 0; r < R; ++r) acc[r][p] = fma(value, broadcast(weights[r * kScoreStride + key]), acc[r][p]);
        values[p] += kPanel;
      }
      ++key;
    }
    add_products<BFloat16>(values, weights + key, kScoreStride, end - key, acc);
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) store(accumulators + r * rows.width + p * kPanel, acc[r][p]);
  }
}

template <int R>
void gather(const Rows& rows, int i, const Tile& tile, int64_t value_panel, int first, int last) {
  if (first >= last) return;
  constexpr int P = panels_at_once(R);
  const int panels = rows.width / kPanel;
  int panel = 0;
  for (; panel + P <= panels; panel += P) gather_panels<R, P>(rows, i, tile, value_panel, panel, first, last);
  for (; panel < panels; ++panel) gather_panels<R, 1>(rows, i, tile, value_panel, panel, first, last);
}

// One tile for R rows that all have keys in it. What they have in common is done together. Later rows begin and end
// later, so only the first one reaches as far back, and the last one as far ahead, as any of them.
template <int R>
void visit(const Rows& rows, int i, const Tile& tile, const AttentionTask& task) {
  const int64_t value_panel = task.kv->value_panel();
  score<R>(rows, i, tile, tile.first(rows.low(i)), tile.last(rows.high(i + R - 1)));
  const int common_first = tile.first(rows.low(i + R - 1)), common_last = tile.last(rows.high(i));
  const bool common = common_first < common_last;
  for (int r = i; r < i + R; ++r) {
    const int first = tile.first(rows.low(r)), last = tile.last(rows.high(r));
    weigh(rows, r, first, last, task.scale, task.softcap);
    gather<1>(rows, r, tile, value_panel, first, common ? common_first : last);
  }
  if (!common) return;
  gather<R>(rows, i, tile, value_panel, common_first, common_last);
  for (int r = i; r < i + R; ++r) gather<1>(rows, r, tile, value_panel, common_last, tile.last(rows.high(r)));
}

template <int R>
void visit_rows(const Rows& rows, int i, int count, const Tile& tile, const AttentionTask& task) {
  if (count == R) {
    visit<R>(rows, i, tile, task);
  } else if constexpr (R > 1) {
    visit_rows<R - 1>(rows, i, count, tile, task);
  }
}

bool has_keys(const Rows& rows, int i, int start, int end) { return rows.low(i) < end && rows.high(i) > start; }

void begin_segment(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) rows.maxima[i] = -infinity();
  for (int64_t i = 0; i < rows.count; ++i) store(rows.sums + i * kLanes, zero());
  for (int64_t i = 0; i < static_cast<int64_t>(rows.count) * rows.width; i += kLanes)
    store(rows.accumulators + i, zero());
}

void end_segment(const Rows& rows, int i, int segment) {
  const int width = rows.width;
  const float* accumulator = rows.accumulators + static_cast<int64_t>(i) * width;
  const float* sums = rows.sums + i * kLanes;
  float* total = rows.totals + static_cast<int64_t>(i) * width;
  float* total_sums = rows.total_sums + i * kLanes;
  if (rows.low(i) >= segment * kKeySegment) {  // the row's first one
    rows.total_maxima[i] = rows.maxima[i];
    store(total_sums, load(sums));
    __builtin_memcpy(total, accumulator, width * sizeof(float));
    return;
  }
  const float old_maximum = rows.total_maxima[i], fresh_maximum = rows.maxima[i];
  const float maximum = fresh_maximum > old_maximum ? fresh_maximum : old_maximum;
  const F32x16 old = exp(broadcast(old_maximum - maximum)), fresh = exp(broadcast(fresh_maximum - maximum));
  store(total_sums, fma(load(sums), fresh, mul(load(total_sums), old)));
  for (int d = 0; d < width; d += kLanes) {
    store(total + d, fma(load(accumulator + d), fresh, mul(load(total + d), old)));
  }
  rows.total_maxima[i] = maximum;
}

// The tile's keys from `first` on; none before is needed by any row, and none from `end` on exists.
void locate(const AttentionTask& task, int start, int first, int end, Tile& tile) {
  const KvView& kv = *task.kv;
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
    piece.values = head + kv.keys_size() + static_cast<int64_t>(group) * kPanel;
    position += group_end - slot;
  }
}

}  // namespace

void attention(const AttentionTask& task) {
  const Rows rows(task);
  const int low = rows.low(0), high = rows.high(rows.count - 1);
  Tile tile;
  for (int segment = low / kKeySegment; segment * kKeySegment < high; ++segment) {
    const int segment_start = segment * kKeySegment;
    const int segment_end = segment_start + kKeySegment < high ? segment_start + kKeySegment : high;
    begin_segment(rows);
    int start = segment_start > low ? segment_start : low / kKeyTile * kKeyTile;
    for (; start < segment_end; start += kKeyTile) {
      locate(task, start, low, high, tile);
      // Rows with keys in this tile are neighbours: those from the first whose range reaches it to the last.
      int i = 0, end = rows.count;
      while (i < end && !has_keys(rows, i, start, start + kKeyTile)) ++i;
      while (end > i && !has_keys(rows, end - 1, start, start + kKeyTile)) --end;
      for (; i < end; i += kAttentionRows) {
        visit_rows<kAttentionRows>(rows, i, end - i < kAttentionRows ? end - i : kAttentionRows, tile, task);
      }
    }
    for (int i = 0; i < rows.count; ++i) {
      if (has_keys(rows, i, segment_start, segment_end)) end_segment(rows, i, segment);
    }
  }
  for (int i = 0; i < rows.count; ++i) {
    const F32x16 sum = broadcast(reduce_add(load(rows.total_sums + i * kLanes)));
    const float* total = rows.totals + static_cast<int64_t>(i) * rows.width;
    float* out = task.out + i / task.group * task.out_stride + i % task.group * rows.head_dim;
    for (int d = 0; d < rows.head_dim; d += kLanes) {
      const int n = rows.head_dim - d < kLanes ? rows.head_dim - d : kLanes;
      store_first(out + d, div(load(total + d), sum), n);
    }
  }
}

}  // namespace paceline::PACELINE_LEVEL
