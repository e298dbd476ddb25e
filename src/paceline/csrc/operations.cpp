#include "operations.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace paceline {
namespace {

// Less work than this, in elements, is not worth waking anybody for.
constexpr int64_t kWorthSharing = 16384;

// f(thread) for every thread's share, on the caller alone if `work` is small. f must not use the barrier then.
template <class F>
void over_threads(Machine& machine, int64_t work, const F& f) {
  if (work >= kWorthSharing) {
    machine.pool.run(f);
    return;
  }
  for (int thread = 0; thread < machine.pool.size(); ++thread) f(thread);
}

// f(first row, number of rows), each row by one thread.
template <class F>
void over_rows(Machine& machine, int64_t rows, int64_t width, F f) {
  over_threads(machine, rows < 2 ? 0 : rows * width, [&](int thread) {
    const Share mine = share_of(rows, machine.pool.size(), thread);
    if (mine.first < mine.last) f(mine.first, static_cast<int>(mine.last - mine.first));
  });
}

int64_t row_width(HeadShape heads) { return static_cast<int64_t>(heads.num_q + 2 * heads.num_kv) * heads.head_dim; }

// Rows in blocks of at most `most`, sizes differing by one; blocks in bands, within which weights are used again from
// the cache before the next rows are taken up.
struct Blocks {
  static constexpr int64_t kBandRows = 96;
  int64_t rows, blocks, bands;
  Blocks(int64_t count, int most) : rows(count) {
    blocks = (rows + most - 1) / most;
    bands = (rows + kBandRows - 1) / kBandRows;
  }
  int64_t block_start(int64_t block) const { return rows * block / blocks; }
  Share band(int64_t index) const { return {blocks * index / bands, blocks * (index + 1) / bands}; }
};

// Weights that are kept close while the blocks of a band go by.
constexpr int64_t kChunkBytes = 16384;

}  // namespace

uint8_t* Machine::scratch_of(int64_t bytes) {
  if (scratch.size() < bytes) scratch = Buffer(bytes);
  return scratch.data();
}

void linear(Machine& machine, const float* x, int64_t rows, const PackedLinear& weight, float* out) {
  if (rows == 0) return;
  const Kernels& kernels = machine.kernels;
  const int threads = machine.pool.size();
  const int groups = (weight.inputs + kGroup - 1) / kGroup;
  const Blocks quantized(rows, kernels.quantized_rows), dense(rows, kernels.dense_rows);
  const int64_t row_record = static_cast<int64_t>(groups) * kQuantizedRecord;
  const bool any_quantized = std::any_of(weight.sections.begin(), weight.sections.end(), [](const Section& section) {
    return section.form == Form::int8 || section.form == Form::int4;
  });
  uint8_t* records = any_quantized ? machine.scratch_of(rows * row_record) : nullptr;
  const auto quantize = [&](Share share) {
    for (int64_t b = share.first; b < share.last; ++b) {
      const int64_t start = quantized.block_start(b);
      kernels.quantize_rows(x + start * weight.inputs, weight.inputs,
                            static_cast<int>(quantized.block_start(b + 1) - start), weight.inputs,
                            records + start * row_record);
    }
  };
  // A few rows are quantised before the others are called: they would only wait for the result.
  const bool shared = any_quantized && rows * weight.inputs >= kWorthSharing;
  if (any_quantized && !shared) quantize({0, quantized.blocks});

  // Several multiply-adds take as long as one element of the other operations.
  const int64_t work = rows * weight.inputs * static_cast<int64_t>(weight.outputs) / 8;
  over_threads(machine, shared ? std::max(work, kWorthSharing) : work, [&](int thread) {
    if (shared) {
      quantize(share_of(quantized.blocks, threads, thread));
      machine.pool.barrier();
    }
    int64_t column = 0;
    for (const Section& section : weight.sections) {
      const bool is_dense = section.form != Form::int8 && section.form != Form::int4;
      const Blocks& blocks = is_dense ? dense : quantized;
      const int64_t chunk = std::max<int64_t>(4, kChunkBytes / section.panel_bytes);
      // Cells (band, panel), panels running fastest.
      const Share mine = share_of(blocks.bands * section.panels, threads, thread);
      for (int64_t cell = mine.first; cell < mine.last;) {
        const int64_t band = cell / section.panels;
        const int64_t panel = cell % section.panels;
        const int64_t count = std::min({chunk, section.panels - panel, mine.last - cell});
        const int64_t first = panel * kPanel;
        PanelRange range{section.weights.data() + panel * section.panel_bytes,
                         section.panel_bytes,
                         static_cast<int>(count),
                         static_cast<int>(std::min<int64_t>(count * kPanel, section.outputs - first)),
                         section.bias.empty() ? nullptr : section.bias.data() + first,
                         nullptr,
                         weight.outputs};
        for (int64_t b = blocks.band(band).first; b < blocks.band(band).last; ++b) {
          const int64_t start = blocks.block_start(b);
          const int size = static_cast<int>(blocks.block_start(b + 1) - start);
          range.out = out + start * weight.outputs + column + first;
          if (section.form == Form::int4) {
            kernels.linear_int4(records + start * row_record, size, groups, range);
          } else if (section.form == Form::int8) {
            kernels.linear_int8(records + start * row_record, size, groups, range);
          } else {
            const DenseType type = section.form == Form::f32   ? DenseType::f32
                                   : section.form == Form::f16 ? DenseType::f16
                                                               : DenseType::bf16;
            kernels.linear_dense(type, x + start * weight.inputs, weight.inputs, size, weight.inputs, range);
          }
        }
        cell += count;
      }
      column += section.outputs;
    }
  });
}

void embed(Machine& machine, const int32_t* ids, int64_t rows, Encoding encoding, const uint8_t* table, int width,
           float scale, float* out) {
  const int64_t bytes = row_bytes(encoding, width);
  over_rows(machine, rows, width, [&](int64_t first, int count) {
    for (int64_t r = first; r < first + count; ++r) {
      float* row = out + r * width;
      decode(encoding, table + ids[r] * bytes, width, row);
      for (int i = 0; i < width; ++i) row[i] *= scale;
    }
  });
}

void rms_norm(Machine& machine, const float* x, const float* weight, float eps, int64_t rows, int width, float* out) {
  over_rows(machine, rows, width, [&](int64_t first, int count) {
    machine.kernels.rms_norm(x + first * width, weight, eps, count, width, out + first * width);
  });
}

void add_rms_norm(Machine& machine, float* residual, const float* update, const float* weight, float eps, int64_t rows,
                  int width, float* out) {
  over_rows(machine, rows, width, [&](int64_t first, int count) {
    const int64_t at = first * width;
    machine.kernels.add_rms_norm(residual + at, update + at, weight, eps, count, width, out + at);
  });
}

void qk_norm(Machine& machine, float* qkv, HeadShape heads, const float* q_weight, const float* k_weight, float eps,
             int64_t rows) {
  over_rows(machine, rows, row_width(heads), [&](int64_t first, int count) {
    machine.kernels.qk_norm(qkv + first * row_width(heads), heads, q_weight, k_weight, eps, count);
  });
}

void rope(Machine& machine, float* qkv, HeadShape heads, const int32_t* positions, const float* cos, const float* sin,
          int half, RopePairs pairs, int64_t rows) {
  over_rows(machine, rows, row_width(heads), [&](int64_t first, int count) {
    machine.kernels.rope(qkv + first * row_width(heads), heads, positions + first, cos, sin, half, pairs, count);
  });
}

void gated_activation(Machine& machine, const float* gate_up, Gate gate, int64_t rows, int width, float* out) {
  over_rows(machine, rows, 4 * static_cast<int64_t>(width), [&](int64_t first, int count) {
    machine.kernels.gated_activation(gate_up + first * 2 * width, gate, count, width, out + first * width);
  });
}

void softcap(Machine& machine, float* x, float cap, int64_t rows, int64_t width) {
  over_rows(machine, rows, 4 * width, [&](int64_t first, int count) {
    for (int64_t r = first; r < first + count; ++r) machine.kernels.softcap(x + r * width, cap, width);
  });
}

void take_rows(Machine& machine, const float* x, const int32_t* rows, int64_t count, int width, float* out) {
  over_rows(machine, count, width, [&](int64_t first, int n) {
    for (int64_t r = first; r < first + n; ++r) {
      std::memcpy(out + r * width, x + static_cast<int64_t>(rows[r]) * width,
                  sizeof(float) * static_cast<size_t>(width));
    }
  });
}

void write_kv(Machine& machine, const float* qkv, HeadShape heads, const KvView& kv, const int32_t* kv_rows,
              int64_t rows) {
  over_rows(machine, rows, row_width(heads), [&](int64_t first, int count) {
    machine.kernels.write_kv(qkv + first * row_width(heads), heads, kv, kv_rows + first, count);
  });
}

void attention(Machine& machine, const float* qkv, HeadShape heads, const KvView& kv, const AttentionSpans& spans,
               float scale, int window, float softcap, float* out) {
  const int group = heads.num_q / heads.num_kv;
  const int tile_tokens = std::max(1, kAttentionTileRows / group);
  const int threads = machine.pool.size();
  // Tiles of tokens by span, each for every key head. The cost of a tile is the keys that its rows visit.
  struct TokenTile {
    int span, first, tokens;  // first: packed token
    int position;
    int64_t cost_before;
  };
  std::vector<TokenTile> tiles;
  int64_t cost = 0;
  for (int s = 0; s < spans.count; ++s) {
    for (int t = spans.starts[s]; t < spans.starts[s + 1]; t += tile_tokens) {
      const int tokens = std::min(tile_tokens, spans.starts[s + 1] - t);
      const int position = spans.context_lens[s] + t - spans.starts[s];
      tiles.push_back({s, t, tokens, position, cost});
      const int keys = window > 0 ? std::min(position + tokens, window + tokens) : position + tokens;
      cost += static_cast<int64_t>(keys + kKeyTile) * tokens;
    }
  }
  const int64_t scratch_bytes =
      (attention_scratch(tile_tokens * group, heads.head_dim) * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
  uint8_t* scratch = machine.scratch_of(scratch_bytes * threads);
  const int64_t stride = row_width(heads);
  const int64_t out_stride = static_cast<int64_t>(heads.num_q) * heads.head_dim;

  // Heads are cut first, then tokens by cost: item i of the line [head][tile] belongs to the thread in whose share of
  // the total cost it begins.
  const auto work = [&](int thread) {
    const Share mine = share_of(cost * heads.num_kv, threads, thread);
    for (int head = 0; head < heads.num_kv; ++head) {
      const int64_t offset = cost * head;
      if (offset >= mine.last || offset + cost <= mine.first) continue;
      auto tile = std::lower_bound(tiles.begin(), tiles.end(), mine.first - offset,
                                   [](const TokenTile& t, int64_t value) { return t.cost_before < value; });
      for (; tile != tiles.end() && offset + tile->cost_before < mine.last; ++tile) {
        AttentionTask task;
        task.queries = qkv + tile->first * stride + static_cast<int64_t>(head) * group * heads.head_dim;
        task.query_stride = stride;
        task.out = out + tile->first * out_stride + static_cast<int64_t>(head) * group * heads.head_dim;
        task.out_stride = out_stride;
        task.tokens = tile->tokens;
        task.group = group;
        task.first_position = tile->position;
        task.blocks = spans.block_tables + tile->span * spans.width;
        task.data = kv.data + head * kv.head_stride;
        task.kv = &kv;
        task.scale = scale;
        task.softcap = softcap;
        task.window = window;
        task.scratch = reinterpret_cast<float*>(scratch + scratch_bytes * thread);
        machine.kernels.attention(task);
      }
    }
  };
  over_threads(machine, cost * heads.num_q * heads.head_dim / 8, work);
}

}  // namespace paceline
