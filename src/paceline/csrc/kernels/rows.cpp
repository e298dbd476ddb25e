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

// bf16 bits of a float: to nearest, ties to even; a NaN stays one.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class Function>
inline void map_row(const float* x, float* out, int64_t count, Function f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, f(load(x + i)));
  if (i < count) {
    const int n = static_cast<int>(count - i);
    store_first(out + i, f(load_first(x + i, n)), n);
  }
}

template <class Function>
inline void gate_row(const float* gate, const float* up, float* out, int width, Function f) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, mul(f(load(gate + i)), load(up + i)));
  if (i < width) {
    const int n = width - i;
    store_first(out + i, mul(f(load_first(gate + i, n)), load_first(up + i, n)), n);
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

void rope(float* qkv, HeadShape heads, const int32_t* positions, const float* cos, const float* sin, int half,
          RopePairs pairs, int rows) {
  const int64_t stride = static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * heads.head_dim;
  for (int r = 0; r < rows; ++r) {
    const float* c = cos + static_cast<int64_t>(positions[r]) * half;
    const float* s = sin + static_cast<int64_t>(positions[r]) * half;
    for (int h = 0; h < heads.num_q + heads.num_kv; ++h) {
      float* x = qkv + r * stride + h * heads.head_dim;
      if (pairs == RopePairs::halves) {
        float* y = x + half;
        for (int i = 0; i < half; ++i) {
          const float a = x[i], b = y[i];
          x[i] = a * c[i] - b * s[i];
          y[i] = b * c[i] + a * s[i];
        }
      } else {
        for (int i = 0; i < half; ++i) {
          const float a = x[2 * i], b = x[2 * i + 1];
          x[2 * i] = a * c[i] - b * s[i];
          x[2 * i + 1] = b * c[i] + a * s[i];
        }
      }
    }
  }
}

void gated_activation(const float* gate_up, Gate gate, int rows, int width, float* out) {
  for (int r = 0; r < rows; ++r) {
    const float* x = gate_up + static_cast<int64_t>(r) * 2 * width;
    float* y = out + static_cast<int64_t>(r) * width;
    if (gate == Gate::silu) {
      gate_row(x, x + width, y, width, [](F32x16 v) { return silu(v); });
    } else {
      gate_row(x, x + width, y, width, [](F32x16 v) { return gelu_tanh(v); });
    }
  }
}

void softcap(float* x, float cap, int64_t count) {
  const F32x16 limit = broadcast(cap);
  map_row(x, x, count, [limit](F32x16 v) { return mul(limit, tanh(div(v, limit))); });
}

void write_kv(const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows, int rows) {
  const int dim = heads.head_dim;
  const int64_t stride = static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * dim;
  const int width = kv.value_width();
  for (int r = 0; r < rows; ++r) {
    const int64_t block = kv_rows[r] / kv.block_size;
    const int slot = kv_rows[r] % kv.block_size;
    for (int h = 0; h < heads.num_kv; ++h) {
      const float* key = qkv + r * stride + (heads.num_q + h) * dim;
      const float* value = key + static_cast<int64_t>(heads.num_kv) * dim;
      uint16_t* head = kv.data + block * kv.block_stride + h * kv.head_stride;
      uint16_t* keys = head + static_cast<int64_t>(slot / kPanel) * kPanel * dim + 2 * (slot % kPanel);
      for (int d = 0; d < dim; ++d) keys[d / 2 * 2 * kPanel + d % 2] = to_bf16(key[d]);
      uint16_t* values = head + kv.keys_size() + static_cast<int64_t>(slot / 2) * 2 * kPanel + slot % 2;
      for (int d = 0; d < width; ++d) {
        values[d / kPanel * kv.value_panel() + d % kPanel * 2] = d < dim ? to_bf16(value[d]) : uint16_t{0};
      }
    }
  }
}

}  // namespace paceline::PACELINE_LEVEL
