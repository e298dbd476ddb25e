// Linear layers over whole arrays.
#pragma once
#include <cstdint>

#include "pack.h"
#include "team.h"

namespace paceline {

// [rows, inputs] -> [rows, outputs], outputs shared.
void linear(const Team& team, const float* x, int64_t rows, const PackedLinear& weight, float* out, uint8_t* scratch);
int64_t linear_scratch(int64_t rows, const PackedLinear& weight, const Kernels& kernels);

// No less than what calls take together that share so many rows among so many of them, each call's a multiple of
// kAlignment.
int64_t linear_scratch(int64_t rows, int64_t parts, const PackedLinear& weight, const Kernels& kernels);

// A linear layer in pieces, for operations that divide several of them among the threads. Of each kind the cells from 0
// on may be done by anyone and in any order; all are prepared before any are multiplied.
class LinearCall {
 public:
  // At least one row; linear_scratch(rows, weight, kernels) bytes of aligned scratch.
  LinearCall(const Kernels& kernels, const float* x, int64_t rows, const PackedLinear& weight, float* out,
             uint8_t* scratch);

  // Brings the activations into the form that the weights are multiplied with.
  int64_t prepare_cells() const;  // 0: they are in it
  void prepare(Share cells) const;

  // Rows come in bands; a cell is one of them and a panel of the section, whose first output is `column`.
  int64_t bands() const;
  void multiply(const Section& section, int64_t column, Share cells) const;

 private:
  int64_t quantize_cells() const;
  void quantize(Share cells) const;
  // The quantised activations of a block of rows.
  Activations block(int64_t index, int64_t first_row, int rows) const;
  // A row rounded to bfloat16.
  uint16_t* rounded(int64_t row) const;

  const Kernels& kernels_;
  const float* x_;
  int64_t rows_;
  const PackedLinear& weight_;
  float* out_;
  uint8_t* scratch_;
  int groups_;
  int64_t bytes_of_row_, bytes_of_block_;
};

// Several multiply-adds take as long as one element of the other operations.
inline int64_t linear_work(int64_t rows, const PackedLinear& weight) {
  return rows * weight.inputs * static_cast<int64_t>(weight.outputs) / 8;
}

}  // namespace paceline
