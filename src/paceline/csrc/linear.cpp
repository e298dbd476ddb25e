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
constexpr int64_t kChunkBytes = 131072;

bool is_quantized(const Section& section) { return section.form == Form::int8 || section.form == Form::int4; }

bool any_quantized(const PackedLinear& weight) {
  return std::any_of(weight.sections.begin(), weight.sections.end(), is_quantized);
}

// Whether there are bfloat16 weights, and a dot that wants the activations in bfloat16, too.
bool any_rounded(const PackedLinear& weight, const Kernels& kernels) {
  const auto is_bf16 = [](const Section& section) { return section.form == Form::bf16; };
  return kernels.linear_bf16 && std::any_of(weight.sections.begin(), weight.sections.end(), is_bf16);
}

int64_t rounded_width(const PackedLinear& weight) { return (weight.inputs + 1) / 2 * 2; }

int64_t rounded_bytes(int64_t rows, const PackedLinear& weight, const Kernels& kernels) {
  if (!any_rounded(weight, kernels)) return 0;
  return align(rows * rounded_width(weight) * static_cast<int64_t>(sizeof(uint16_t)));
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
  take(a.words, cells * kGroup);
  a.both = reinterpret_cast<int8_t*>(a.words);
  take(a.scales, cells);
  take(a.scaled_sums, cells);
  take(a.high_sums, cells);
  take(a.low_sums, cells);
  take(a.order, cells);
  take(a.num_short, groups);
  return offset;
}

// Bytes that a row takes in a block, not counting what aligns the block's arrays: in 64 rows they are aligned anyway.
int64_t bytes_of_row(int groups) {
  Activations a;
  return (lay_out(nullptr, 64, groups, a) + 63) / 64;
}

// What else a block takes: its arrays without rows, and a line to align each of them.
int64_t bytes_of_block(int groups) {
  Activations a;
  return lay_out(nullptr, 0, groups, a) + 16 * kAlignment;
}

int64_t quantized_bytes(int64_t rows, const PackedLinear& weight) {
  if (!any_quantized(weight)) return 0;
  const int groups = groups_of(weight);
  return align(rows * bytes_of_row(groups)) + Blocks(rows, kBlockRows).count * bytes_of_block(groups);
}

}  // namespace

int64_t linear_scratch(int64_t rows, const PackedLinear& weight, const Kernels& kernels) {
  return quantized_bytes(rows, weight) + rounded_bytes(rows, weight, kernels);
}

int64_t linear_scratch(int64_t rows, int64_t parts, const PackedLinear& weight, const Kernels& kernels) {
  const int64_t rounded = any_rounded(weight, kernels) ? rounded_bytes(rows, weight, kernels) + parts * kAlignment : 0;
  if (!any_quantized(weight)) return rounded;
  const int groups = groups_of(weight);
  const int64_t blocks = std::min(rows, parts + rows / kBlockRows);
  return rounded + rows * bytes_of_row(groups) + parts * kAlignment + blocks * bytes_of_block(groups);
}

LinearCall::LinearCall(const Kernels& kernels, const float* x, int64_t rows, const PackedLinear& weight, float* out,
                       uint8_t* scratch)
    : kernels_(kernels),
      x_(x),
      rows_(rows),
      weight_(weight),
      out_(out),
      scratch_(scratch),
      groups_(groups_of(weight)),
      bytes_of_row_(bytes_of_row(groups_)),
      bytes_of_block_(bytes_of_block(groups_)) {}

Activations LinearCall::block(int64_t index, int64_t first_row, int rows) const {
  Activations a;
  lay_out(scratch_ + align(first_row * bytes_of_row_) + index * bytes_of_block_, rows, groups_, a);
  return a;
}

int64_t LinearCall::quantize_cells() const {
  return any_quantized(weight_) ? Blocks(rows_, kBlockRows).count * groups_ : 0;
}

void LinearCall::quantize(Share cells) const {
  const Blocks blocks(rows_, kBlockRows);
  // Cells (block, group), groups running fastest, so that few rows are shared, too.
  for (int64_t cell = cells.first; cell < cells.last;) {
    const int64_t b = cell / groups_;
    const int group = static_cast<int>(cell % groups_);
    const int count = static_cast<int>(std::min<int64_t>(groups_ - group, cells.last - cell));
    kernels_.quantize_rows(x_ + blocks.start(b) * weight_.inputs, weight_.inputs, weight_.inputs,
                           block(b, blocks.start(b), blocks.size(b)), group, count);
    cell += count;
  }
}

uint16_t* LinearCall::rounded(int64_t row) const {
  uint16_t* rows = reinterpret_cast<uint16_t*>(scratch_ + quantized_bytes(rows_, weight_));
  return rows + row * rounded_width(weight_);
}

int64_t LinearCall::prepare_cells() const { return quantize_cells() + (any_rounded(weight_, kernels_) ? rows_ : 0); }

void LinearCall::prepare(Share cells) const {
  // First the cells to quantise, then the rows to round.
  const int64_t border = quantize_cells();
  quantize({std::min(cells.first, border), std::min(cells.last, border)});
  for (int64_t row = std::max(cells.first, border) - border; row < cells.last - border; ++row) {
    kernels_.round_row(x_ + row * weight_.inputs, weight_.inputs, rounded(row));
  }
}

int64_t LinearCall::bands() const { return Blocks(rows_, kBlockRows).bands; }

void LinearCall::multiply(const Section& section, int64_t column, Share cells) const {
  const bool rounded_bf16 = section.form == Form::bf16 && kernels_.linear_bf16;
  const Blocks blocks(rows_, is_quantized(section) ? kBlockRows
                             : rounded_bf16        ? kernels_.bf16_rows
                                                   : kernels_.dense_rows);
  const int64_t chunk = std::max<int64_t>(4, kChunkBytes / section.panel_bytes);
  // Cells (band, panel), panels running fastest.
  for (int64_t cell = cells.first; cell < cells.last;) {
    const int64_t band = cell / section.panels;
    const int64_t panel = cell % section.panels;
    const int64_t count = std::min({chunk, section.panels - panel, cells.last - cell});
    const int64_t first = panel * kPanel;
    PanelRange range{section.weights.data() + panel * section.panel_bytes,
                     section.panel_bytes,
                     static_cast<int>(count),
                     static_cast<int>(std::min<int64_t>(count * kPanel, section.outputs - first)),
                     section.bias.empty() ? nullptr : section.bias.data() + first,
                     nullptr,
                     weight_.outputs};
    for (int64_t b = blocks.band(band).first; b < blocks.band(band).last; ++b) {
      range.out = out_ + blocks.start(b) * weight_.outputs + column + first;
      if (section.form == Form::int4) {
        kernels_.linear_int4(block(b, blocks.start(b), blocks.size(b)), range);
      } else if (section.form == Form::int8) {
        kernels_.linear_int8(block(b, blocks.start(b), blocks.size(b)), range);
      } else if (rounded_bf16) {
        kernels_.linear_bf16(rounded(blocks.start(b)), rounded_width(weight_), blocks.size(b), weight_.inputs, range);
      } else {
        const DenseType type = section.form == Form::f32   ? DenseType::f32
                               : section.form == Form::f16 ? DenseType::f16
                                                           : DenseType::bf16;
        kernels_.linear_dense(type, x_ + blocks.start(b) * weight_.inputs, weight_.inputs, blocks.size(b),
                              weight_.inputs, range);
      }
    }
    cell += count;
  }
}

void linear(const Team& team, const float* x, int64_t rows, const PackedLinear& weight, float* out, uint8_t* scratch) {
  if (rows == 0) return;
  const LinearCall call(team.kernels, x, rows, weight, out, scratch);
  if (const int64_t cells = call.prepare_cells()) {
    call.prepare(team.share(cells));
    team.barrier();
  }
  int64_t column = 0;
  for (const Section& section : weight.sections) {
    call.multiply(section, column, team.share(call.bands() * section.panels));
    column += section.outputs;
  }
}

}  // namespace paceline
