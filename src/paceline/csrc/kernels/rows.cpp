// Operations on one row at a time: norms, rotations, gates, the store's writes.
#include "kernels.h"
#include "level_kernels.h"
#include "simd.h"

namespace paceline::PACELINE_LEVEL {
namespace {

// x / sqrt(mean(x^2) + eps) * weight. Lane i sums elements i, i + 16, ... by fma; the lanes meet in the fixed tree.
inline void norm(const float* x, const float* weight, float eps, int width, float* out) {
  F32x16 sum = zero();
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F32x16 v = load(x + i);
    sum = fma(v, v, sum);
  }
  if (i < width) {
    const F32x16 v = load_first(x + i, width - i);
    sum = fma(v, v, sum);
  }
  const float mean = reduce_add(sum) / static_cast<float>(width);
  const F32x16 factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i + kLanes <= width; i += kLanes) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < width) {
    const int n = width - i;
    store_first(out + i, mul(mul(load_first(x + i, n), factor), load_first(weight + i, n)), n);
  }
}

// (x - mean) / sqrt(variance + eps) * weight + bias. The mean first, then the squares of what is left: lane i sums
// elements i, i + 16, ...; the lanes meet in the fixed tree.
inline void center(const float* x, const float* weight, const float* bias, float eps, int width, float* out) {
  F32x16 sum = zero();
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) sum = add(sum, load(x + i));
  const int left = width - i;
  const Mask16 lanes = lanes_between(0, left);
  if (left > 0) sum = add(sum, load_first(x + i, left));
  const F32x16 mean = broadcast(reduce_add(sum) / static_cast<float>(width));
  F32x16 squares = zero();
  for (i = 0; i + kLanes <= width; i += kLanes) {
    const F32x16 v = sub(load(x + i), mean);
    squares = fma(v, v, squares);
  }
  if (left > 0) {
    const F32x16 v = select(lanes, sub(load_first(x + i, left), mean), zero());
    squares = fma(v, v, squares);
  }
  const float variance = reduce_add(squares) / static_cast<float>(width);
  const F32x16 factor = broadcast(1.0f / __builtin_sqrtf(variance + eps));
  for (i = 0; i + kLanes <= width; i += kLanes) {
    store(out + i, fma(mul(sub(load(x + i), mean), factor), load(weight + i), load(bias + i)));
  }
  if (left > 0) {
    const F32x16 v = mul(sub(load_first(x + i, left), mean), factor);
    store_first(out + i, fma(v, load_first(weight + i, left), load_first(bias + i, left)), left);
  }
}

// Turns pairs (a[kStep i], b[kStep i]) by angle i.
template <int kStep>
inline void rotate(float* a, float* b, const float* cos, const float* sin, int count) {
  for (int i = 0; i < count; ++i) {
    const float x = a[kStep * i], y = b[kStep * i];
    a[kStep * i] = x * cos[i] - y * sin[i];
    b[kStep * i] = y * cos[i] + x * sin[i];
  }
}

// To bfloat16: to nearest, ties to even; a NaN stays one. Without branches, so that the compiler's vectors can do it.
inline void to_bf16(const float* x, int count, uint16_t* out) {
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    out[i] = static_cast<uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
  }
}

template <class F>
inline void map_row(const float* x, float* out, int64_t count, F f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, f(load(x + i)));
  if (i < count) {
    const int n = static_cast<int>(count - i);
    store_first(out + i, f(load_first(x + i, n)), n);
  }
}

template <class F>
inline void gate_row(const float* gate, const float* up, float* out, int width, F f) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, mul(f(load(gate + i)), load(up + i)));
  if (i < width) {
    const int n = width - i;
    store_first(out + i, mul(f(load_first(gate + i, n)), load_first(up + i, n)), n);
  }
}

// use(f) with the function as one of vectors.
template <class Use>
inline void with(Function function, Use use) {
  switch (function) {
    case Function::silu:
      return use([](F32x16 v) { return silu(v); });
    case Function::gelu_tanh:
      return use([](F32x16 v) { return gelu_tanh(v); });
    case Function::gelu:
      return use([](F32x16 v) { return gelu(v); });
    case Function::quick_gelu:
      return use([](F32x16 v) { return quick_gelu(v); });
  }
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int rows, int width, float* out) {
  for (int r = 0; r < rows; ++r) {
    norm(x + static_cast<int64_t>(r) * width, weight, eps, width, out + static_cast<int64_t>(r) * width);
  }
}

void add_rms_norm(float* residual, const float* update, const float* weight, float eps, int rows, int width,
                  float* out) {
  for (int r = 0; r < rows; ++r) {
    float* row = residual + static_cast<int64_t>(r) * width;
    const float* more = update + static_cast<int64_t>(r) * width;
    for (int i = 0; i < width; ++i) row[i] += more[i];
    norm(row, weight, eps, width, out + static_cast<int64_t>(r) * width);
  }
}

void qk_norm(float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps, int rows) {
  const int64_t stride = static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * heads.head_dim;
  for (int r = 0; r < rows; ++r) {
    for (int h = 0; h < heads.num_q + heads.num_kv; ++h) {
      float* head = qkv + r * stride + h * heads.head_dim;
      norm(head, h < heads.num_q ? q_weight : k_weight, eps, heads.head_dim, head);
    }
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int rows, int width, float* out) {
  for (int r = 0; r < rows; ++r) {
    const int64_t at = static_cast<int64_t>(r) * width;
    center(x + at, weight, bias, eps, width, out + at);
  }
}

void rope(float* qkv, HeadShape heads, const int32_t* positions, int num_axes, const RopeTable& table, int rows) {
  constexpr int kPairs = 64;  // whose angles are looked up together
  const int64_t stride = static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * heads.head_dim;
  float gathered_cos[kPairs], gathered_sin[kPairs];
  for (int r = 0; r < rows; ++r) {
    const int32_t* position = positions + static_cast<int64_t>(r) * num_axes;
    for (int first = 0; first < table.half; first += kPairs) {
      const int count = table.half - first < kPairs ? table.half - first : kPairs;
      const float* cos = table.cos + static_cast<int64_t>(position[0]) * table.half + first;
      const float* sin = table.sin + static_cast<int64_t>(position[0]) * table.half + first;
      if (table.axes) {
        for (int i = 0; i < count; ++i) {
          const int64_t at = static_cast<int64_t>(position[table.axes[first + i]]) * table.half + first + i;
          gathered_cos[i] = table.cos[at];
          gathered_sin[i] = table.sin[at];
        }
        cos = gathered_cos;
        sin = gathered_sin;
      }
      for (int h = 0; h < heads.num_q + heads.num_kv; ++h) {
        float* head = qkv + r * stride + h * heads.head_dim;
        if (table.pairs == RopePairs::halves) {
          rotate<1>(head + first, head + table.half + first, cos, sin, count);
        } else {
          rotate<2>(head + 2 * first, head + 2 * first + 1, cos, sin, count);
        }
      }
    }
  }
}

void gated_activation(const float* gate_up, Function function, int rows, int width, float* out) {
  with(function, [=](auto f) {
    for (int r = 0; r < rows; ++r) {
      const float* gate = gate_up + static_cast<int64_t>(r) * 2 * width;
      gate_row(gate, gate + width, out + static_cast<int64_t>(r) * width, width, f);
    }
  });
}

void activate(float* x, Function function, int64_t count) {
  with(function, [=](auto f) { map_row(x, x, count, f); });
}

void combine_rows(const float* rows, int64_t stride, const int32_t* places, const float* weights, int count, int width,
                  float* out) {
  for (int i = 0; i < width; i += kLanes) {
    const int n = width - i < kLanes ? width - i : kLanes;
    F32x16 sum = zero();
    for (int j = 0; j < count; ++j) {
      sum = fma(load_first(rows + places[j] * stride + i, n), broadcast(weights[j]), sum);
    }
    store_first(out + i, sum, n);
  }
}

void add_to(float* x, const float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] += y[i];
}

void softcap(float* x, float cap, int64_t count) {
  const F32x16 limit = broadcast(cap);
  map_row(x, x, count, [limit](F32x16 v) { return mul(limit, tanh(div(v, limit))); });
}

void write_kv(const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows, int rows) {
  constexpr int kPart = 64;  // elements that are rounded together; whole panels
  const int dim = heads.head_dim;
  const int64_t stride = static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * dim;
  for (int r = 0; r < rows; ++r) {
    const int64_t block = kv_rows[r] / kv.block_size;
    const int slot = kv_rows[r] % kv.block_size;
    for (int h = 0; h < heads.num_kv; ++h) {
      const float* key = qkv + r * stride + (heads.num_q + h) * dim;
      const float* value = key + static_cast<int64_t>(heads.num_kv) * dim;
      uint16_t* head = kv.data + block * kv.block_stride + h * kv.head_stride;
      uint16_t* keys = head + static_cast<int64_t>(slot / kPanel) * kPanel * dim + 2 * (slot % kPanel);
      uint16_t* values = head + kv.keys_size() + static_cast<int64_t>(slot / 2) * 2 * kPanel + slot % 2;
      for (int first = 0; first < dim; first += kPart) {
        const int count = dim - first < kPart ? dim - first : kPart;
        uint16_t part[kPart] = {};
        to_bf16(key + first, count, part);
        // head_dim is even: a pair of elements at once
        for (int d = 0; d < count; d += 2) __builtin_memcpy(keys + (first + d) * kPanel, part + d, 2 * sizeof part[0]);
        to_bf16(value + first, count, part);
        for (int d = 0; d < (count + kPanel - 1) / kPanel * kPanel; ++d) {
          values[(first + d) / kPanel * kv.value_panel() + d % kPanel * 2] = d < count ? part[d] : uint16_t{0};
        }
      }
    }
  }
}

}  // namespace paceline::PACELINE_LEVEL
