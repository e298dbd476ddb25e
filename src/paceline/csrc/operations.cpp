#include "operations.h"

#include <cstring>

namespace paceline {
namespace {

// f(first row, number of rows) for this thread's rows, if it has any.
template <class F>
void over_rows(const Team& team, int64_t rows, F f) {
  const Share mine = team.share(rows);
  if (mine.first < mine.last) f(mine.first, static_cast<int>(mine.last - mine.first));
}

}  // namespace

void embed(const Team& team, const int32_t* ids, int64_t rows, Encoding encoding, const uint8_t* table, int width,
           float scale, float* out) {
  const int64_t bytes = row_bytes(encoding, width);
  over_rows(team, rows, [&](int64_t first, int count) {
    for (int64_t r = first; r < first + count; ++r) {
      float* row = out + r * width;
      decode(encoding, table + ids[r] * bytes, width, row);
      for (int i = 0; i < width; ++i) row[i] *= scale;
    }
  });
}

void rms_norm(const Team& team, const float* x, const float* weight, float eps, int64_t rows, int width, float* out) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.rms_norm(x + first * width, weight, eps, count, width, out + first * width);
  });
}

void add_rms_norm(const Team& team, float* residual, const float* update, const float* weight, float eps, int64_t rows,
                  int width, float* out) {
  over_rows(team, rows, [&](int64_t first, int count) {
    const int64_t at = first * width;
    team.kernels.add_rms_norm(residual + at, update + at, weight, eps, count, width, out + at);
  });
}

void qk_norm(const Team& team, float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps,
             int64_t rows) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.qk_norm(qkv + first * row_width(heads), heads, q_weight, k_weight, eps, count);
  });
}

void layer_norm(const Team& team, const float* x, const float* weight, const float* bias, float eps, int64_t rows,
                int width, float* out) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.layer_norm(x + first * width, weight, bias, eps, count, width, out + first * width);
  });
}

void rope(const Team& team, float* qkv, HeadShape heads, const int32_t* positions, int num_axes, const RopeTable& table,
          int64_t rows) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.rope(qkv + first * row_width(heads), heads, positions + first * num_axes, num_axes, table, count);
  });
}

void gated_activation(const Team& team, const float* gate_up, Function function, int64_t rows, int width, float* out) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.gated_activation(gate_up + first * 2 * width, function, count, width, out + first * width);
  });
}

void activate(const Team& team, float* x, Function function, int64_t rows, int64_t width) {
  over_rows(team, rows,
            [&](int64_t first, int count) { team.kernels.activate(x + first * width, function, count * width); });
}

void add(const Team& team, float* x, const float* y, int64_t rows, int64_t width) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.add_to(x + first * width, y + first * width, count * width);
  });
}

void route(const Team& team, const float* logits, const Routing& routing, int64_t rows, int32_t* ids, float* weights) {
  over_rows(team, rows, [&](int64_t first, int count) {
    const int64_t at = first * routing.top_k;
    team.kernels.route(logits + first * routing.num_experts, routing, count, ids + at, weights + at);
  });
}

void softcap(const Team& team, float* x, float cap, int64_t rows, int64_t width) {
  over_rows(team, rows, [&](int64_t first, int count) { team.kernels.softcap(x + first * width, cap, count * width); });
}

void take_rows(const Team& team, const float* x, const int32_t* rows, int64_t count, int width, float* out) {
  over_rows(team, count, [&](int64_t first, int n) {
    for (int64_t r = first; r < first + n; ++r) {
      std::memcpy(out + r * width, x + static_cast<int64_t>(rows[r]) * width,
                  sizeof(float) * static_cast<size_t>(width));
    }
  });
}

void write_kv(const Team& team, const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows,
              int64_t rows) {
  over_rows(team, rows, [&](int64_t first, int count) {
    team.kernels.write_kv(qkv + first * row_width(heads), heads, kv, kv_rows + first, count);
  });
}

}  // namespace paceline
