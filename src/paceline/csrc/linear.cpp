#include "linear.h"

#include <algorithm>
#include <type_traits>

namespace paceline {
namespace {

// Rows in blocks of at most `most`, sizes differing by one; blocks in bands, within which weights are used again from
// the cache before the next rows are taken up.
struct Blocks {
  static constexpr int64_t kBandRows = 96;
  int64_t rows, count, bands;
  Blocks(int64_t num_rows, int most)
      : rows(num_rows), count((num_rows + most - 1) / most), bands((num_rows + kBandRows - 1) / kBandRows) {}
  int64_t start(int64_t block) const { return rows * block / count; }
  int size(int64_t block) const { return static_cast<int>(start(block + 1) - start(block)); }
  Share band(int64_t index) const { return {count * index / bands, count * (index + 1) / bands}; }
};

// Weights that are kept close while the blocks of a band go by.
constexpr int64_t kChunkBytes = 16384;

bool is_quantized(const Section& section) { return section.form == Form::int8 || section.form == Form::int4; }

bool any_quantized(const PackedLinear& weight) {
  return std::any_of(weight.sections.begin(), weight.sections.end(), is_quantized);
}

int groups_of(const PackedLinear& weight) { return (weight.inputs + kGroup - 1) / kGroup; }

// Lays the arrays of a block of quantised activations one after the other and returns the bytes they take.
int64_t lay_out(uint8_t* memory, int rows, int groups, Activations& a) {
  const int64_t cells = static_cast<int64_t>(rows) * groups;
  int64_t offset = 0;
  const auto take = [&](auto*& array, int64_t count) {
    using T = std::remove_reference_t<decltype(*array)>;
    array = reinterpret_cast<T*>(memory + offset);
    offset += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  };
  a.rows = rows;
  a.groups = groups;
  take(a.high, cells * kGroup);
  take(a.low, cells * kGroup);
  take(a.whole, cells * kGroup);
  take(a.scales, cells);
  take(a.scaled_sums, cells);
  take(a.high_sums, cells);
  take(a.low_sums, cells);
  take(a.order, cells);
  take(a.num_short, groups);
  return offset;
}

// The quantised activations of all blocks.
struct QuantizedRows {
  Blocks blocks;
  int groups;
  int64_t block_bytes;
  uint8_t* memory;

  QuantizedRows(int64_t rows, const PackedLinear& weight, uint8_t* scratch)
      : blocks(rows, kBlockRows), groups(groups_of(weight)), memory(scratch) {
    Activations largest;
    block_bytes = lay_out(nullptr, static_cast<int>(std::min<int64_t>(rows, kBlockRows)), groups, largest);
  }
  Activations block(int64_t index) const {
    Activations a;
    lay_out(memory + index * block_bytes, blocks.size(index), groups, a);
    return a;
  }
};

}  // namespace

int64_t linear_scratch(int64_t rows, const PackedLinear& weight) {
  if (!any_quantized(weight)) return 0;
  const QuantizedRows quantized(rows, weight, nullptr);
  return quantized.blocks.count * quantized.block_bytes;
}

void linear(const Team& team, const float* x, int64_t rows, const PackedLinear& weight, float* out, uint8_t* scratch) {
  if (rows == 0) return;
  const Kernels& kernels = team.kernels;
  const QuantizedRows quantized(rows, weight, scratch);
  const Blocks dense(rows, kernels.dense_rows);
  if (any_quantized(weight)) {
    // Cells (block, group), groups running fastest, so that few rows are shared, too.
    const Share mine = team.share(quantized.blocks.count * quantized.groups);
    for (int64_t cell = mine.first; cell < mine.last;) {
      const int64_t block = cell / quantized.groups;
      const int group = static_cast<int>(cell % quantized.groups);
      const int count = static_cast<int>(std::min<int64_t>(quantized.groups - group, mine.last - cell));
      kernels.quantize_rows(x + quantized.blocks.start(block) * weight.inputs, weight.inputs, weight.inputs,
                            quantized.block(block), group, count);
      cell += count;
    }
    team.barrier();
  }
  int64_t column = 0;
  for (const Section& section : weight.sections) {
    const Blocks& blocks = is_quantized(section) ? quantized.blocks : dense;
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
        range.out = out + blocks.start(b) * weight.outputs + column + first;
        if (section.form == Form::int4) {
          kernels.linear_int4(quantized.block(b), range);
        } else if (section.form == Form::int8) {
          kernels.linear_int8(quantized.block(b), range);
        } else {
          const DenseType type = section.form == Form::f32   ? DenseType::f32
                                 : section.form == Form::f16 ? DenseType::f16
                                                             : DenseType::bf16;
          kernels.linear_dense(type, x + blocks.start(b) * weight.inputs, weight.inputs, blocks.size(b), weight.inputs,
                               range);
        }
      }
      cell += count;
    }
    column += section.outputs;
  }
}

}  // namespace paceline
