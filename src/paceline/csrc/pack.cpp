#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "kernels/kernels.h"

namespace paceline {
namespace {

bool is_dense(Encoding encoding) { return block_elements(encoding) == 1; }

int64_t panel_bytes(Form form, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  switch (form) {
    case Form::f32:
      return inputs * kPanel * 4;
    case Form::f16:
      return inputs * kPanel * 2;
    case Form::bf16:
      return (inputs + inputs % 2) * kPanel * 2;
    case Form::int8:
      return groups * static_cast<int64_t>(sizeof(Int8Group));
    case Form::int4:
      return groups * static_cast<int64_t>(sizeof(Int4Group));
  }
  return 0;
}

// One row's place in its panel; `lane` is the row's number there.
void pack_dense_row(Form form, const uint8_t* row, int64_t inputs, uint8_t* panel, int lane) {
  for (int64_t k = 0; k < inputs; ++k) {
    if (form == Form::f32) {
      std::memcpy(panel + (k * kPanel + lane) * 4, row + k * 4, 4);
    } else if (form == Form::f16) {
      std::memcpy(panel + (k * kPanel + lane) * 2, row + k * 2, 2);
    } else {
      std::memcpy(panel + (k / 2 * 2 * kPanel + lane * 2 + k % 2) * 2, row + k * 2, 2);
    }
  }
}

void put_int8(const int8_t* quants, uint16_t scale, Int8Group& group, int lane) {
  for (int s = 0; s < 8; ++s) std::memcpy(group.quants[s][lane], quants + 4 * s, 4);
  group.scales[lane] = scale;
}

void put_int4(const uint8_t* codes, uint16_t scale, uint16_t minimum, Int4Group& group, int lane) {
  for (int s = 0; s < 4; ++s) {
    for (int i = 0; i < 4; ++i) {
      group.quants[s][lane][i] = static_cast<uint8_t>(codes[4 * s + i] | codes[4 * s + i + 16] << 4);
    }
  }
  group.scales[lane] = scale;
  group.minima[lane] = minimum;
}

// Symmetric: the scale is the largest magnitude / 127 as float16, and the quants are rounded with what that came to.
bool quantize_int8(const float* x, Int8Group& group, int lane) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(x[i]));
  const uint16_t half = float_to_half(largest / 127.0f);
  const float scale = half_to_float(half);
  int8_t quants[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float q = scale > 0.0f ? std::nearbyint(x[i] / scale) : 0.0f;
    quants[i] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, q)));
  }
  put_int8(quants, half, group, lane);
  return std::isfinite(scale);
}

// Asymmetric: the smallest and the largest number are codes 0 and 15.
bool quantize_int4(const float* x, Int4Group& group, int lane) {
  const auto [low, high] = std::minmax_element(x, x + kGroup);
  const uint16_t half_minimum = float_to_half(*low);
  const float minimum = half_to_float(half_minimum);
  const uint16_t half_scale = float_to_half((*high - minimum) / 15.0f);
  const float scale = half_to_float(half_scale);
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const float q = scale > 0.0f ? std::nearbyint((x[i] - minimum) / scale) : 0.0f;
    codes[i] = static_cast<uint8_t>(std::min(15.0f, std::max(0.0f, q)));
  }
  put_int4(codes, half_scale, half_minimum, group, lane);
  return std::isfinite(scale) && std::isfinite(minimum);
}

bool pack_quantized_row(Form form, Encoding encoding, const uint8_t* row, int64_t inputs, uint8_t* panel, int lane) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  auto* int8_groups = reinterpret_cast<Int8Group*>(panel);
  auto* int4_groups = reinterpret_cast<Int4Group*>(panel);
  if (encoding == Encoding::Q8_0) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* block = row + g * block_bytes(encoding);
      uint16_t scale;
      std::memcpy(&scale, block, 2);
      put_int8(reinterpret_cast<const int8_t*>(block + 2), scale, int8_groups[g], lane);
    }
    return true;
  }
  if (form == Form::int4 && !is_dense(encoding)) {
    for (int64_t g = 0; g < groups; ++g) {
      const NibbleGroup group = nibble_group(encoding, row, g);
      put_int4(group.codes, float_to_half(group.scale), float_to_half(group.minimum), int4_groups[g], lane);
    }
    return true;
  }
  std::vector<float> numbers(static_cast<size_t>(groups) * kGroup, 0.0f);
  decode(encoding, row, inputs, numbers.data());
  bool fits = true;
  for (int64_t g = 0; g < groups; ++g) {
    const float* x = numbers.data() + g * kGroup;
    fits &= form == Form::int8 ? quantize_int8(x, int8_groups[g], lane) : quantize_int4(x, int4_groups[g], lane);
  }
  return fits;
}

Section pack_section(const std::vector<Part>& parts, Form form, int inputs, const float* bias, ThreadPool& pool) {
  Section section{form, 0, 0, panel_bytes(form, inputs), {}, {}};
  std::vector<int64_t> starts{0};
  for (const Part& part : parts) starts.push_back(starts.back() + part.rows);
  section.outputs = static_cast<int>(starts.back());
  section.panels = (section.outputs + kPanel - 1) / kPanel;
  section.weights = Buffer(section.panels * section.panel_bytes);
  if (bias) {
    section.bias.assign(static_cast<size_t>(section.panels) * kPanel, 0.0f);
    std::copy(bias, bias + section.outputs, section.bias.begin());
  }
  std::atomic<bool> fits{true};
  pool.run([&](int thread) {
    const Share mine = share_of(section.panels, pool.size(), thread);
    for (int64_t p = mine.first; p < mine.last; ++p) {
      uint8_t* panel = section.weights.data() + p * section.panel_bytes;
      const bool partial = (p + 1) * kPanel > section.outputs;
      if (partial || (form == Form::bf16 && inputs % 2)) std::memset(panel, 0, section.panel_bytes);
      for (int lane = 0; lane < kPanel && p * kPanel + lane < section.outputs; ++lane) {
        const int64_t output = p * kPanel + lane;
        const auto index = std::upper_bound(starts.begin(), starts.end(), output) - starts.begin() - 1;
        const Part& part = parts[static_cast<size_t>(index)];
        const uint8_t* row =
            part.data + (output - starts[static_cast<size_t>(index)]) * row_bytes(part.encoding, inputs);
        if (form == Form::int8 || form == Form::int4) {
          if (!pack_quantized_row(form, part.encoding, row, inputs, panel, lane)) fits = false;
        } else {
          pack_dense_row(form, row, inputs, panel, lane);
        }
      }
    }
  });
  if (!fits) throw std::invalid_argument("the weights are too large (or not finite) for a float16 scale");
  return section;
}

}  // namespace

Form form_of(Encoding encoding, Quantization quantization) {
  switch (encoding) {
    case Encoding::Q4_0:
    case Encoding::Q4_1:
    case Encoding::Q4_K:
      return Form::int4;
    case Encoding::F32:
    case Encoding::F16:
    case Encoding::BF16:
      if (quantization == Quantization::int8) return Form::int8;
      if (quantization == Quantization::int4) return Form::int4;
      return encoding == Encoding::F32 ? Form::f32 : encoding == Encoding::F16 ? Form::f16 : Form::bf16;
    default:
      return Form::int8;
  }
}

const char* form_name(Form form) {
  switch (form) {
    case Form::f32:
      return "f32";
    case Form::f16:
      return "f16";
    case Form::bf16:
      return "bf16";
    case Form::int8:
      return "int8-g32";
    case Form::int4:
      return "int4-g32";
  }
  return "";
}

int64_t PackedLinear::bytes() const {
  int64_t sum = 0;
  for (const Section& section : sections) {
    sum += section.weights.size() + static_cast<int64_t>(section.bias.size() * sizeof(float));
  }
  return sum;
}

PackedLinear pack_linear(const std::vector<Part>& parts, int inputs, const float* bias, Quantization quantization,
                         ThreadPool& pool) {
  PackedLinear linear(inputs);
  for (size_t first = 0; first < parts.size();) {
    const Form form = form_of(parts[first].encoding, quantization);
    size_t last = first + 1;
    while (last < parts.size() && form_of(parts[last].encoding, quantization) == form) ++last;
    const std::vector<Part> run(parts.begin() + static_cast<std::ptrdiff_t>(first),
                                parts.begin() + static_cast<std::ptrdiff_t>(last));
    linear.sections.push_back(pack_section(run, form, inputs, bias ? bias + linear.outputs : nullptr, pool));
    linear.outputs += linear.sections.back().outputs;
    first = last;
  }
  return linear;
}

}  // namespace paceline
