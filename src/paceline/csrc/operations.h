// The operations over whole arrays: how each is divided among the threads. Pointers and sizes only, checked by the
// caller.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "pack.h"
#include "thread_pool.h"

namespace paceline {

// Where and with what the operations run. The scratch memory grows to the largest need and is kept.
struct Machine {
  ThreadPool& pool;
  const Kernels& kernels;
  Buffer scratch;

  uint8_t* scratch_of(int64_t bytes);
};

void linear(Machine& machine, const float* x, int64_t rows, const PackedLinear& weight, float* out);
void embed(Machine& machine, const int32_t* ids, int64_t rows, Encoding encoding, const uint8_t* table, int width,
           float scale, float* out);
void rms_norm(Machine& machine, const float* x, const float* weight, float eps, int64_t rows, int width, float* out);
void add_rms_norm(Machine& machine, float* residual, const float* update, const float* weight, float eps, int64_t rows,
                  int width, float* out);
void qk_norm(Machine& machine, float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps,
             int64_t rows);
void rope(Machine& machine, float* qkv, HeadShape heads, const int32_t* positions, const float* cos, const float* sin,
          int half, RopePairs pairs, int64_t rows);
void gated_activation(Machine& machine, const float* gate_up, Gate gate, int64_t rows, int width, float* out);
void softcap(Machine& machine, float* x, float cap, int64_t rows, int64_t width);
void take_rows(Machine& machine, const float* x, const int32_t* rows, int64_t count, int width, float* out);
void write_kv(Machine& machine, const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows,
              int64_t rows);

struct AttentionSpans {
  int count;
  const int32_t* starts;        // [count + 1]
  const int32_t* context_lens;  // [count]
  const int32_t* block_tables;  // [count, width]
  int64_t width;
};
void attention(Machine& machine, const float* qkv, HeadShape heads, const KvView& kv, const AttentionSpans& spans,
               float scale, int window, float softcap, float* out);

}  // namespace paceline
