// The kernels of one level, as the table of that level collects them. kernels.h says what they do.
#pragma once
#include "kernels.h"
#include "level.h"

namespace paceline::PACELINE_LEVEL {

void quantize_rows(const float* x, int64_t stride, int inputs, const Activations& a, int first_group, int num_groups);
void linear_int8(const Activations& a, const PanelRange& range);
void linear_int4(const Activations& a, const PanelRange& range);
void linear_int8_in_tiles(const Activations& a, const PanelRange& range);
void linear_int4_in_tiles(const Activations& a, const PanelRange& range);
void linear_dense(DenseType type, const float* x, int64_t stride, int rows, int inputs, const PanelRange& range);
void round_row(const float* x, int inputs, uint16_t* out);
void linear_bf16(const uint16_t* x, int64_t stride, int rows, int inputs, const PanelRange& range);
bool quantize_weights_int8(const float* x, Int8Group& group);
bool quantize_weights_int4(const float* x, Int4Group& group);
void rms_norm(const float* x, const float* weight, float eps, int rows, int width, float* out);
void add_rms_norm(float* residual, const float* update, const float* weight, float eps, int rows, int width,
                  float* out);
void qk_norm(float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps, int rows);
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int rows, int width, float* out);
void rope(float* qkv, HeadShape heads, const int32_t* positions, int num_axes, const RopeTable& table, int rows);
void gated_activation(const float* gate_up, Function function, int rows, int width, float* out);
void route(const float* logits, const Routing& routing, int rows, int32_t* ids, float* weights);
void combine_rows(const float* rows, int64_t stride, const int32_t* places, const float* weights, int count, int width,
                  float* out);
void activate(float* x, Function function, int64_t count);
void add_to(float* x, const float* y, int64_t count);
void softcap(float* x, float cap, int64_t count);
void write_kv(const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows, int rows);
void attention(const AttentionTask& task);
void pack_segment(const float* keys, const float* values, int64_t stride, int count, int head_dim, float* packed_keys,
                  float* packed_values);
void encoder_attention(const EncoderTask& task);
RowPeak find_peak(const float* x, int count);
void scale_row(const float* x, int count, float peak, float temperature, float* z, float* mass);
double sum_row(const float* x, int count);
int count_at_least(const float* x, int count, float bound);
int collect_at_least(const float* x, int count, float bound, int32_t* ids);
int collect_contenders(const float* mass, int first, int count, uint64_t row, float factor, int32_t* ids);

}  // namespace paceline::PACELINE_LEVEL
