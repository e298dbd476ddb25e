#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace paceline {
namespace {

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

// Word i of a row becomes word i of a lane: the words of a panel, and those of a group in it, lie [i][lane].
void put_words(const uint8_t* row, int64_t words, uint8_t* target, int lane) {
  for (int64_t i = 0; i < words; ++i) std::memcpy(target + (i * kPanel + lane) * 4, row + i * 4, 4);
}

void pack_dense_row(Form form, const uint8_t* row, int64_t inputs, uint8_t* panel, int lane) {
  if (form == Form::f32) {
    put_words(row, inputs, panel, lane);
  } else if (form == Form::bf16) {
    put_words(row, inputs / 2, panel, lane);
    if (inputs % 2) std::memcpy(panel + (inputs / 2 * kPanel + lane) * 4, row + (inputs - 1) * 2, 2);
  } else {
    for (int64_t k = 0; k < inputs; ++k) std::memcpy(panel + (k * kPanel + lane) * 2, row + k * 2, 2);
  }
}

// Encodings whose quants go into a packed form as they are. Their groups hold the words in our order.
bool keeps_quants(Encoding encoding) {
  return encoding == Encoding::Q8_0 || encoding == Encoding::Q4_0 || encoding == Encoding::Q4_1 ||
         encoding == Encoding::Q4_K;
}

void pack_quants(Encoding encoding, const uint8_t* row, int64_t inputs, uint8_t* panel, int lane) {
  for (int64_t g = 0; g < inputs / kGroup; ++g) {
    if (encoding == Encoding::Q8_0) {
      Int8Group& group = reinterpret_cast<Int8Group*>(panel)[g];
      const uint8_t* block = row + g * block_bytes(encoding);
      std::memcpy(&group.scales[lane], block, 2);
      put_words(block + 2, 8, reinterpret_cast<uint8_t*>(group.quants), lane);
    } else {
      Int4Group& group = reinterpret_cast<Int4Group*>(panel)[g];
      const NibbleGroup nibbles = nibble_group(encoding, row, g);
      group.scales[lane] = float_to_half(nibbles.scale);
      group.minima[lane] = float_to_half(nibbles.minimum);
      put_words(nibbles.codes, 4, reinterpret_cast<uint8_t*>(group.quants), lane);
    }
  }
}

// A row as it lies in its file.
struct Row {
  Encoding encoding;
  const uint8_t* data;
};

std::vector<Row> rows_of(const std::vector<Part>& parts, int64_t inputs) {
  std::vector<Row> rows;
  for (const Part& part : parts) {
    const int64_t stride = row_bytes(part.encoding, inputs);
    for (int64_t r = 0; r < part.rows; ++r) rows.push_back({part.encoding, part.data + r * stride});
  }
  return rows;
}

// Rounds the rows of a panel that have no quants of our form. False if a weight or its scale does not fit.
bool quantize_panel(Form form, const Row* rows, int lanes, int64_t inputs, const Kernels& kernels, uint8_t* panel) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  std::vector<float> numbers(static_cast<size_t>(kPanel * groups * kGroup), 0.0f);
  for (int lane = 0; lane < lanes; ++lane) {
    if (!keeps_quants(rows[lane].encoding)) {
      decode(rows[lane].encoding, rows[lane].data, inputs, numbers.data() + lane * groups * kGroup);
    }
  }
  bool fits = true;
  for (int64_t g = 0; g < groups; ++g) {
    float x[kGroup * kPanel];
    for (int lane = 0; lane < kPanel; ++lane) {
      const float* row = numbers.data() + (lane * groups + g) * kGroup;
      for (int k = 0; k < kGroup; ++k) x[k * kPanel + lane] = row[k];
    }
    fits &= form == Form::int8 ? kernels.quantize_weights_int8(x, reinterpret_cast<Int8Group*>(panel)[g])
                               : kernels.quantize_weights_int4(x, reinterpret_cast<Int4Group*>(panel)[g]);
  }
  return fits;
}

bool pack_panel(Form form, const Row* rows, int lanes, int64_t inputs, const Kernels& kernels, uint8_t* panel) {
  if (form != Form::int8 && form != Form::int4) {
    for (int lane = 0; lane < lanes; ++lane) pack_dense_row(form, rows[lane].data, inputs, panel, lane);
    return true;
  }
  bool fits = true;
  const auto keeps = [](const Row& row) { return keeps_quants(row.encoding); };
  if (!std::all_of(rows, rows + lanes, keeps)) fits = quantize_panel(form, rows, lanes, inputs, kernels, panel);
  // Over the zeros that rounding has left in their lanes.
  for (int lane = 0; lane < lanes; ++lane) {
    if (keeps(rows[lane])) pack_quants(rows[lane].encoding, rows[lane].data, inputs, panel, lane);
  }
  return fits;
}

Section pack_section(const std::vector<Part>& parts, Form form, int inputs, const float* bias, Machine& machine) {
  const std::vector<Row> rows = rows_of(parts, inputs);
  Section section{form, static_cast<int>(rows.size()), 0, panel_bytes(form, inputs), {}, {}};
  section.panels = (section.outputs + kPanel - 1) / kPanel;
  section.weights = machine.weights.take(section.panels * section.panel_bytes);
  if (bias) {
    section.bias.assign(static_cast<size_t>(section.panels) * kPanel, 0.0f);
    std::copy(bias, bias + section.outputs, section.bias.begin());
  }
  std::atomic<bool> fits{true};
  machine.pool.run([&](int thread) {
    const Share mine = share_of(section.panels, machine.pool.size(), thread);
    for (int64_t p = mine.first; p < mine.last; ++p) {
      uint8_t* panel = section.weights.data() + p * section.panel_bytes;
      const int lanes = static_cast<int>(std::min<int64_t>(kPanel, section.outputs - p * kPanel));
      if (lanes < kPanel || (form == Form::bf16 && inputs % 2)) std::memset(panel, 0, section.panel_bytes);
      if (!pack_panel(form, rows.data() + p * kPanel, lanes, inputs, machine.kernels, panel)) fits = false;
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
                         Machine& machine) {
  PackedLinear linear(inputs);
  for (size_t first = 0; first < parts.size();) {
    const Form form = form_of(parts[first].encoding, quantization);
    size_t last = first + 1;
    while (last < parts.size() && form_of(parts[last].encoding, quantization) == form) ++last;
    const std::vector<Part> run(parts.begin() + static_cast<std::ptrdiff_t>(first),
                                parts.begin() + static_cast<std::ptrdiff_t>(last));
    const float* part_bias = bias ? bias + linear.outputs : nullptr;
    linear.sections.push_back(pack_section(run, form, inputs, part_bias, machine));
    linear.outputs += linear.sections.back().outputs;
    first = last;
  }
  return linear;
}

}  // namespace paceline
