// The operations whose rows are independent, over whole arrays: rows are shared. Pointers and sizes only, checked by
// the caller.
#pragma once
#include <cstdint>

#include "encodings.h"
#include "team.h"

namespace paceline {

void embed(const Team& team, const int32_t* ids, int64_t rows, Encoding encoding, const uint8_t* table, int width,
           float scale, float* out);
void rms_norm(const Team& team, const float* x, const float* weight, float eps, int64_t rows, int width, float* out);
void add_rms_norm(const Team& team, float* residual, const float* update, const float* weight, float eps, int64_t rows,
                  int width, float* out);
void qk_norm(const Team& team, float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps,
             int64_t rows);
void layer_norm(const Team& team, const float* x, const float* weight, const float* bias, float eps, int64_t rows,
                int width, float* out);
void rope(const Team& team, float* qkv, HeadShape heads, const int32_t* positions, int num_axes, const RopeTable& table,
          int64_t rows);
void gated_activation(const Team& team, const float* gate_up, Function function, int64_t rows, int width, float* out);
void activate(const Team& team, float* x, Function function, int64_t rows, int64_t width);
void add(const Team& team, float* x, const float* y, int64_t rows, int64_t width);
void route(const Team& team, const float* logits, const Routing& routing, int64_t rows, int32_t* ids, float* weights);
inline int64_t route_work(const Routing& routing) {
  return routing.num_experts * static_cast<int64_t>(routing.top_k + 4);
}
void softcap(const Team& team, float* x, float cap, int64_t rows, int64_t width);
void take_rows(const Team& team, const float* x, const int32_t* rows, int64_t count, int width, float* out);
void write_kv(const Team& team, const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows,
              int64_t rows);

}  // namespace paceline
