// What each instruction set offers: plain functions over pointers and sizes, each run by one thread over its share of
// the outputs. Nothing here knows of threads, arrays of Python, or models. docs/kernels.md draws the layouts.
#pragma once
#include <cstdint>

namespace paceline {

constexpr int kPanel = 16;  // outputs that lie side by side in the lanes of a vector
constexpr int kGroup = 32;  // inputs that share a scale

// Packed weights of 16 outputs and 32 inputs. Bytes of the quants: [step][output][4 inputs of the step].
struct Int8Group {
  int8_t quants[8][kPanel][4];  // step s holds inputs 4s .. 4s + 3
  uint16_t scales[kPanel];      // float16
};
// weight = scale * quant + minimum, quant 0..15
struct Int4Group {
  uint8_t quants[4][kPanel][4];  // low halves: step s, high halves: step s + 4
  uint16_t scales[kPanel];       // float16
  uint16_t minima[kPanel];       // float16
};
static_assert(sizeof(Int8Group) == 544 && sizeof(Int4Group) == 320, "no padding");

// A block of rows of activations, quantised in groups of 32: number = scale * quant. Most quants have 8 bits. A group
// whose numbers stand out of its row has 12, so that their rounding does not outweigh all others: quant = 16 * high +
// low. A cell is a group of a row; each array begins with [groups][cells]. The cells of a group are sorted, those with
// 8 bits first, or, where the level multiplies in tiles, in the order of the rows.
struct Activations {
  int rows, groups;
  // The quants, [32], as the level's dots want them: as digits, where low is written for the cells with 12 bits only;
  int8_t *high, *low;
  int16_t* words;                 // of each four inputs the first, third, second, fourth;
  int8_t* both;                   // or [2][32]: high digits (zero with 8 bits), then low ones; shares the words' memory
  float *scales, *scaled_sums;    // scaled sum: scale * sum of the quants
  int32_t *high_sums, *low_sums;  // of the digits
  uint8_t* order;                 // the row that the cell belongs to
  int32_t* num_short;             // [groups] only: how many have 8 bits
};
constexpr int kBlockRows = 32;  // most rows of a block

// The weights of `panels` panels and where their outputs go. out points at the first panel's column of the block's
// first row; the last panel may have fewer than 16 outputs. bias (or null) is padded to whole panels.
struct PanelRange {
  const void* weights;
  int64_t panel_bytes;
  int panels;
  int outputs;  // in all of them
  const float* bias;
  float* out;
  int64_t out_stride;
};

enum class DenseType { f32, f16, bf16 };

struct HeadShape {
  int num_q, num_kv, head_dim;
};
inline int64_t row_width(HeadShape heads) {
  return static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * heads.head_dim;
}

// Keys and values of one layer. A block holds, for each key head, panels of 16 tokens' keys, [head_dim / 2][16
// tokens][2 elements], then panels of 16 elements of the values, [slots / 2][16 elements][2 tokens]. All bf16.
struct KvView {
  uint16_t* data;
  int64_t block_stride;  // in numbers, between blocks
  int64_t head_stride;   // in numbers, between key heads of a block
  int block_size;
  int head_dim;
  int num_kv;
  int value_width() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
  int64_t value_panel() const { return static_cast<int64_t>(block_size + 1) / 2 * 2 * kPanel; }
  int64_t values_size() const { return value_panel() * (value_width() / kPanel); }
  int64_t keys_size() const { return static_cast<int64_t>(block_size + kPanel - 1) / kPanel * kPanel * head_dim; }
};

// Attention of consecutive tokens of one sequence, one key head and the query heads that use it.
struct AttentionTask {
  const float* queries;  // first token's first query head of the group
  int64_t query_stride;  // between tokens
  float* out;
  int64_t out_stride;
  int tokens, group;
  int first_position;  // of the first token
  const int32_t* blocks;
  const uint16_t* data;  // the view's data, moved to the key head
  const KvView* kv;
  float scale, softcap;
  int window;
  float* scratch;  // attention_floats(tokens * group, head_dim) floats
};
constexpr int kKeyTile = 64;       // keys that are visited together, at absolute positions
constexpr int kKeySegment = 1024;  // keys of one running softmax; segments merge in ascending order
// (token, head) rows that share a pass over the keys, unless the group is larger.
constexpr int kAttentionTileRows = 16;
inline int64_t attention_floats(int rows, int head_dim) {
  const int64_t width = (head_dim + kPanel - 1) / kPanel * kPanel;
  return rows * (kKeyTile + 2 * kPanel + 3 * width + 2 * kPanel + 2);
}

constexpr int kMostDenseRows = 16;  // no level's blocks of dense rows are larger
constexpr int kEncoderRows = 48;    // most rows of a task

// One query head of a few rows of a segment, over all of the segment's keys. Packed keys: [keys / 16, rounded
// up][head_dim][16 keys]; packed values: [keys / 64, rounded up][head_dim / 16, rounded up][64 keys][16 elements].
struct EncoderTask {
  const float* queries;  // the first row's
  int64_t query_stride;
  float* out;
  int64_t out_stride;
  int rows, keys;
  const float *packed_keys, *packed_values;
  int head_dim;
  float scale, softcap;
  float* scratch;  // encoder_attention_floats(head_dim) floats
};
inline int64_t encoder_attention_floats(int head_dim) {
  const int64_t width = (head_dim + kPanel - 1) / kPanel * kPanel;
  return kMostDenseRows * (width + kKeyTile) + kEncoderRows * (width + kPanel + 1);
}

constexpr int kNoiseTile = 1024;  // tokens whose noise is looked at together

// The largest number of a row and the first place where it stands.
struct RowPeak {
  float value;
  int index;
  bool has_nan;
};

enum class RopePairs { halves, neighbours };

// Cosines and sines [positions][half]. A token has num_axes positions; axes[i] says which of them turns pair i, and
// where axes is null it is the first.
struct RopeTable {
  const float *cos, *sin;
  int half;
  RopePairs pairs;
  const int32_t* axes;
};

constexpr int kMaxExperts = 1024;

// How a router's logits choose each token's experts.
struct Routing {
  int num_experts, top_k;
  bool sigmoid;  // scores; else softmax
  bool renormalize;
  float scale;
  int num_groups, top_groups;  // experts are chosen from the best groups only
  const float* bias;           // of the scores, while experts are chosen; or null
};

enum class Function { silu, gelu_tanh, gelu, quick_gelu };

struct Kernels {
  const char* name;
  int dense_rows;  // most rows of a block of dense activations

  // Groups first_group .. first_group + num_groups - 1 of all rows.
  void (*quantize_rows)(const float* x, int64_t stride, int inputs, const Activations& a, int first_group,
                        int num_groups);
  void (*linear_int8)(const Activations& a, const PanelRange& range);
  void (*linear_int4)(const Activations& a, const PanelRange& range);
  void (*linear_dense)(DenseType type, const float* x, int64_t stride, int rows, int inputs, const PanelRange& range);
  // Bfloat16 weights where the processor multiplies bfloat16 pairs, else null: what `numerics` calls its order of sums;
  // most rows of a block; a row rounded, with a zero after an odd last input; rows of them, even `stride` numbers
  // apart, times the weights.
  const char* bf16_name;
  int bf16_rows;
  void (*round_row)(const float* x, int inputs, uint16_t* out);
  void (*linear_bf16)(const uint16_t* x, int64_t stride, int rows, int inputs, const PanelRange& range);

  // 16 rows' weights x[kGroup][kPanel], rounded. False if one is not finite, or too large for a float16 scale.
  bool (*quantize_weights_int8)(const float* x, Int8Group& group);
  bool (*quantize_weights_int4)(const float* x, Int4Group& group);

  void (*rms_norm)(const float* x, const float* weight, float eps, int rows, int width, float* out);
  void (*add_rms_norm)(float* residual, const float* update, const float* weight, float eps, int rows, int width,
                       float* out);
  void (*qk_norm)(float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps, int rows);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int rows, int width,
                     float* out);
  void (*rope)(float* qkv, HeadShape heads, const int32_t* positions, int num_axes, const RopeTable& table, int rows);
  void (*gated_activation)(const float* gate_up, Function function, int rows, int width, float* out);
  // ids and weights: [rows][top_k]
  void (*route)(const float* logits, const Routing& routing, int rows, int32_t* ids, float* weights);
  // out = the sum of weights[i] * rows[places[i]], by fma in this order
  void (*combine_rows)(const float* rows, int64_t stride, const int32_t* places, const float* weights, int count,
                       int width, float* out);
  void (*activate)(float* x, Function function, int64_t count);
  void (*add_to)(float* x, const float* y, int64_t count);
  void (*softcap)(float* x, float cap, int64_t count);
  void (*write_kv)(const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows, int rows);
  void (*attention)(const AttentionTask& task);
  // Keys and values of one head: `count` rows, `stride` apart.
  void (*pack_segment)(const float* keys, const float* values, int64_t stride, int count, int head_dim,
                       float* packed_keys, float* packed_values);
  void (*encoder_attention)(const EncoderTask& task);

  RowPeak (*find_peak)(const float* x, int count);
  // z = (x - peak) / temperature, mass = e^z
  void (*scale_row)(const float* x, int count, float peak, float temperature, float* z, float* mass);
  // 16 float lanes over tiles of 1024, the tiles' sums in double, ascending
  double (*sum_row)(const float* x, int count);
  int (*count_at_least)(const float* x, int count, float bound);
  // Ascending ids; returns how many. `ids` has room for all.
  int (*collect_at_least)(const float* x, int count, float bound, int32_t* ids);
  // Those of ids first .. first + count - 1 (at most kNoiseTile) whose uniform number u, cut to 24 bits, has
  // 1 - u <= mass * factor. `row` is the row's hash (ops/noise.py).
  int (*collect_contenders)(const float* mass, int first, int count, uint64_t row, float factor, int32_t* ids);
};

}  // namespace paceline
