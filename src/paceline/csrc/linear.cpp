#include "linear.h"

#include <algorithm>

namespace paceline {
namespace {

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

bool is_quantized(const Section& section) { return section.form == Form::int8 || section.form == Form::int4; }

bool any_quantized(const PackedLinear& weight) {
  return std::any_of(weight.sections.begin(), weight.sections.end(), is_quantized);
}

int groups_of(const PackedLinear& weight) { return (weight.inputs + kGroup - 1) / kGroup; }

int64_t record_of_row(const PackedLinear& weight) { return static_cast<int64_t>(groups_of(weight)) * kQuantizedRecord; }

}  // namespace

int64_t linear_scratch(int64_t rows, const PackedLinear& weight) {
  return any_quantized(weight) ? rows * record_of_row(weight) : 0;
}

void linear(const Team& team, const float* x, int64_t rows, const PackedLinear& weight, float* out, uint8_t* scratch) {
  if (rows == 0) return;
  const Kernels& kernels = team.kernels;
  const int groups = groups_of(weight);
  const int64_t row_record = record_of_row(weight);
  const Blocks quantized(rows, kernels.quantized_rows), dense(rows, kernels.dense_rows);
  if (any_quantized(weight)) {
    const Share mine = team.share(quantized.blocks);
    for (int64_t b = mine.first; b < mine.last; ++b) {
      const int64_t start = quantized.block_start(b);
      kernels.quantize_rows(x + start * weight.inputs, weight.inputs,
                            static_cast<int>(quantized.block_start(b + 1) - start), weight.inputs,
                            scratch + start * row_record);
    }
    team.barrier();
  }
  int64_t column = 0;
  for (const Section& section : weight.sections) {
    const Blocks& blocks = is_quantized(section) ? quantized : dense;
    const int64_t chunk = std::max<int64_t>(4, kChunkBytes / section.panel_bytes);
    // Cells (band, panel), panels running fastest.
    const Share mine = team.share(blocks.bands * section.panels);
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
          kernels.linear_int4(scratch + start * row_record, size, groups, range);
        } else if (section.form == Form::int8) {
          kernels.linear_int8(scratch + start * row_record, size, groups, range);
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
}

}  // namespace paceline
