// Attention among all rows of a segment: every row sees every other one.
//
// Keys are visited in tiles of 64, counted from the start of the segment. For each row:
//   score = fma chain over the head's elements, * scale, soft cap; new maximum m; p = e^(score - m)
//   sums (16 lanes) = sums * e^(old m - m), then the p are added
//   accumulator = fma(accumulator, e^(old m - m), product), the product of the tile being one fma chain over its keys
// Scores and products are dense linear layers, with the tile's keys and values for weights.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

static_assert(kDenseRows <= kMostDenseRows, "encoder_attention_floats leaves room for that many rows");

struct Row {
  float *accumulator, *sums, *maximum;
};

// From scores to weights p, in place; returns what shrinks the sums before.
float weigh(float* scores, int count, float scale, float softcap, Row row) {
  F32x16 s[kKeyTile / kLanes], largest = broadcast(-infinity());
  for (int g = 0; g * kLanes < count; ++g) {
    F32x16 v = mul(load(scores + g * kLanes), broadcast(scale));
    if (softcap > 0.0f) v = mul(broadcast(softcap), tanh(div(v, broadcast(softcap))));
    const int n = count - g * kLanes < kLanes ? count - g * kLanes : kLanes;
    s[g] = select(lanes_between(0, n), v, broadcast(-infinity()));
    largest = max(largest, s[g]);
  }
  const float old = *row.maximum, tile_maximum = reduce_max(largest);
  const float maximum = tile_maximum > old ? tile_maximum : old;
  const F32x16 factor = exp(broadcast(old - maximum));
  F32x16 sums = mul(load(row.sums), factor);
  for (int g = 0; g * kLanes < count; ++g) {
    const F32x16 p = exp(sub(s[g], broadcast(maximum)));
    store(scores + g * kLanes, p);
    sums = add(sums, p);
  }
  store(row.sums, sums);
  *row.maximum = maximum;
  float factors[kLanes];
  store(factors, factor);
  return factors[0];
}

}  // namespace

void pack_segment(const float* keys, const float* values, int64_t stride, int count, int head_dim, float* packed_keys,
                  float* packed_values) {
  for (int first = 0; first < count; first += kPanel) {
    const int n = count - first < kPanel ? count - first : kPanel;
    const float* source = keys + first * stride;
    for (int d = 0; d < head_dim; ++d) {
      for (int i = 0; i < kPanel; ++i) *packed_keys++ = i < n ? source[i * stride + d] : 0.0f;
    }
  }
  const int panels = (head_dim + kPanel - 1) / kPanel;
  for (int key = 0; key < count; ++key) {
    const float* source = values + key * stride;
    float* tile = packed_values + static_cast<int64_t>(key / kKeyTile) * panels * kKeyTile * kPanel;
    for (int d = 0; d < head_dim; d += kPanel) {
      const int n = head_dim - d < kPanel ? head_dim - d : kPanel;
      store(tile + (d / kPanel * kKeyTile + key % kKeyTile) * kPanel, load_first(source + d, n));
    }
  }
}

void encoder_attention(const EncoderTask& task) {
  const int panels = (task.head_dim + kPanel - 1) / kPanel, width = panels * kPanel;
  float* products = task.scratch;
  float* scores = products + kMostDenseRows * width;
  float* accumulators = scores + kMostDenseRows * kKeyTile;
  float* sums = accumulators + kEncoderRows * width;
  float* maxima = sums + kEncoderRows * kLanes;
  for (int r = 0; r < task.rows; ++r) {
    maxima[r] = -infinity();
    store(sums + r * kLanes, zero());
    for (int d = 0; d < width; d += kLanes) store(accumulators + r * width + d, zero());
  }
  const int64_t key_panel = static_cast<int64_t>(task.head_dim) * kPanel, value_panel = kKeyTile * kPanel;
  for (int start = 0; start < task.keys; start += kKeyTile) {
    const int count = task.keys - start < kKeyTile ? task.keys - start : kKeyTile;
    const int key_panels = (count + kPanel - 1) / kPanel;
    const PanelRange keys{task.packed_keys + start / kPanel * key_panel,
                          key_panel * static_cast<int64_t>(sizeof(float)),
                          key_panels,
                          key_panels * kPanel,
                          nullptr,
                          scores,
                          kKeyTile};
    const PanelRange values{task.packed_values + start / kKeyTile * panels * value_panel,
                            value_panel * static_cast<int64_t>(sizeof(float)),
                            panels,
                            width,
                            nullptr,
                            products,
                            width};
    for (int first = 0; first < task.rows; first += kDenseRows) {
      const int rows = task.rows - first < kDenseRows ? task.rows - first : kDenseRows;
      linear_dense(DenseType::f32, task.queries + first * task.query_stride, task.query_stride, rows, task.head_dim,
                   keys);
      float factors[kDenseRows];
      for (int r = 0; r < rows; ++r) {
        const int at = first + r;
        const Row row{accumulators + at * width, sums + at * kLanes, maxima + at};
        factors[r] = weigh(scores + r * kKeyTile, count, task.scale, task.softcap, row);
      }
      linear_dense(DenseType::f32, scores, kKeyTile, rows, count, values);
      for (int r = 0; r < rows; ++r) {
        float* accumulator = accumulators + (first + r) * width;
        for (int d = 0; d < width; d += kLanes) {
          store(accumulator + d, fma(load(accumulator + d), broadcast(factors[r]), load(products + r * width + d)));
        }
      }
    }
  }
  for (int r = 0; r < task.rows; ++r) {
    const F32x16 sum = broadcast(reduce_add(load(sums + r * kLanes)));
    for (int d = 0; d < task.head_dim; d += kLanes) {
      const int n = task.head_dim - d < kLanes ? task.head_dim - d : kLanes;
      store_first(task.out + r * task.out_stride + d, div(load(accumulators + r * width + d), sum), n);
    }
  }
}

}  // namespace paceline::PACELINE_LEVEL
