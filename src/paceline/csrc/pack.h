// From a checkpoint's tensors to the forms that the kernels read.
#pragma once
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "encodings.h"
#include "team.h"

namespace paceline {

enum class Form { f32, f16, bf16, int8, int4 };
const char* form_name(Form form);

// A matrix [rows, inputs] as it lies in its file.
struct Part {
  Encoding encoding;
  int64_t rows;
  const uint8_t* data;
};

// Neighbouring outputs in one form.
struct Section {
  Form form;
  int outputs, panels;
  int64_t panel_bytes;
  Buffer weights;
  std::vector<float> bias;  // empty, or padded to whole panels
};

struct PackedLinear {
  explicit PackedLinear(int num_inputs) : inputs(num_inputs) {}
  PackedLinear(PackedLinear&&) = default;
  PackedLinear(const PackedLinear&) = delete;

  int outputs = 0, inputs;
  std::vector<Section> sections;
  int64_t bytes() const;
};

// What dense weights become: what they are, or a quantised form.
enum class Quantization { none, int8, int4 };

// What a matrix of this encoding becomes. Dense ones keep their precision unless `quantization` says otherwise. Q4_0,
// Q4_1 and Q4_K become int4, Q8_0 int8, all others int8 with new scales.
Form form_of(Encoding encoding, Quantization quantization);

// Stacks the parts; neighbours of one form share a section. bias is null or has as many numbers as there are outputs.
// Throws std::invalid_argument if a scale does not fit float16.
PackedLinear pack_linear(const std::vector<Part>& parts, int inputs, const float* bias, Quantization quantization,
                         Machine& machine);

}  // namespace paceline
