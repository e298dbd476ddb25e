#include "encodings.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace paceline {
namespace {

struct Description {
  const char* name;
  int elements, bytes;
};
constexpr Description kDescriptions[] = {
    {"F32", 1, 4},    {"F16", 1, 2},    {"BF16", 1, 2},     {"Q4_0", 32, 18},   {"Q4_1", 32, 20},   {"Q5_0", 32, 22},
    {"Q5_1", 32, 24}, {"Q8_0", 32, 34}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210},
};

template <class T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

float read_half(const uint8_t* p) { return half_to_float(read<uint16_t>(p)); }

// The 6-bit scale and minimum of subgroup j, from the 12 bytes that Q4_K and Q5_K share.
void k_scale(const uint8_t* packed, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = packed[j] & 63;
    minimum = packed[j + 4] & 63;
  } else {
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
    minimum = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  }
}

void decode_q5(const uint8_t* block, bool with_minimum, float* out) {
  const float scale = read_half(block);
  const float minimum = with_minimum ? read_half(block + 2) : 0.0f;
  const uint8_t* high = block + (with_minimum ? 4 : 2);
  const uint32_t fifth = read<uint32_t>(high);
  const uint8_t* low = high + 4;
  int codes[32];
  for (int j = 0; j < 16; ++j) {
    codes[j] = (low[j] & 15) | (fifth >> j & 1) << 4;
    codes[j + 16] = low[j] >> 4 | (fifth >> (j + 16) & 1) << 4;
  }
  if (with_minimum) {
    for (int j = 0; j < 32; ++j) out[j] = scale * codes[j] + minimum;
  } else {
    for (int j = 0; j < 32; ++j) out[j] = scale * (codes[j] - 16);
  }
}

void decode_q5_k(const uint8_t* block, float* out) {
  const float d = read_half(block), dmin = read_half(block + 2);
  const uint8_t *high = block + 16, *low = block + 48;
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    k_scale(block + 4, j, scale, minimum);
    const float s = d * scale, m = dmin * minimum;
    const uint8_t* nibbles = low + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int code = (j % 2 ? nibbles[i] >> 4 : nibbles[i] & 15) | (high[i] >> j & 1) << 4;
      out[32 * j + i] = s * code - m;
    }
  }
}

void decode_q6_k(const uint8_t* block, float* out) {
  const uint8_t *low = block, *high = block + 128;
  const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192);
  const float d = read_half(block + 208);
  for (int half = 0; half < 2; ++half, low += 64, high += 32) {
    for (int quarter = 0; quarter < 4; ++quarter, scales += 2, out += 32) {
      const int low_shift = quarter / 2 * 4, high_shift = 2 * quarter;
      const uint8_t* nibbles = low + 32 * (quarter % 2);
      for (int i = 0; i < 32; ++i) {
        const int code = (nibbles[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
        out[i] = d * scales[i / 16] * (code - 32);
      }
    }
  }
}

void decode_block(Encoding encoding, const uint8_t* block, float* out) {
  switch (encoding) {
    case Encoding::F32:
    case Encoding::BF16:
      return;  // decode does these at once
    case Encoding::F16:
      out[0] = read_half(block);
      return;
    case Encoding::Q5_0:
      return decode_q5(block, false, out);
    case Encoding::Q5_1:
      return decode_q5(block, true, out);
    case Encoding::Q8_0: {
      const float scale = read_half(block);
      for (int j = 0; j < 32; ++j) out[j] = scale * static_cast<int8_t>(block[2 + j]);
      return;
    }
    case Encoding::Q5_K:
      return decode_q5_k(block, out);
    case Encoding::Q6_K:
      return decode_q6_k(block, out);
    case Encoding::Q4_0: {
      const NibbleGroup group = nibble_group(encoding, block, 0);
      for (int j = 0; j < 32; ++j) out[j] = group.scale * (group.code(j) - 8);
      return;
    }
    case Encoding::Q4_1:
    case Encoding::Q4_K:
      for (int g = 0; g < block_elements(encoding) / 32; ++g) {
        const NibbleGroup group = nibble_group(encoding, block, g);
        for (int j = 0; j < 32; ++j) out[32 * g + j] = group.scale * group.code(j) + group.minimum;
      }
      return;
  }
}

}  // namespace

Encoding parse_encoding(std::string_view name) {
  for (int i = 0; i < static_cast<int>(std::size(kDescriptions)); ++i) {
    if (name == kDescriptions[i].name) return static_cast<Encoding>(i);
  }
  throw std::invalid_argument("unknown encoding " + std::string(name));
}

int block_elements(Encoding encoding) { return kDescriptions[static_cast<int>(encoding)].elements; }
int block_bytes(Encoding encoding) { return kDescriptions[static_cast<int>(encoding)].bytes; }

float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float r;
  std::memcpy(&r, &bits, sizeof r);
  r *= 0x1p112f;  // the exponent's bias, 127 instead of 15; right for subnormal numbers too
  std::memcpy(&bits, &r, sizeof bits);
  if (magnitude >= 0x7c00u) bits = magnitude << 13 | 0x7f800000u;
  bits |= (half & 0x8000u) << 16;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}

uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 2^16 or more
  if (bits < 0x38800000u) {                        // subnormal: let the float addition round at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    const float shifted = magnitude + 0.5f;
    std::memcpy(&bits, &shifted, sizeof bits);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | (bits - 0x38000000u) >> 13);
}

void decode(Encoding encoding, const uint8_t* data, int64_t elements, float* out) {
  if (encoding == Encoding::F32) {
    std::memcpy(out, data, static_cast<size_t>(elements) * sizeof(float));
    return;
  }
  if (encoding == Encoding::BF16) {
    for (int64_t i = 0; i < elements; ++i) out[i] = bf16_to_float(read<uint16_t>(data + 2 * i));
    return;
  }
  const int step = block_elements(encoding), bytes = block_bytes(encoding);
  for (int64_t i = 0; i < elements; i += step, data += bytes, out += step) decode_block(encoding, data, out);
}

NibbleGroup nibble_group(Encoding encoding, const uint8_t* row, int64_t group) {
  NibbleGroup r;
  if (encoding == Encoding::Q4_K) {
    const uint8_t* block = row + group / 8 * block_bytes(encoding);
    const int j = group % 8;
    int scale, minimum;
    k_scale(block + 4, j, scale, minimum);
    r.scale = read_half(block) * scale;
    r.minimum = -(read_half(block + 2) * minimum);
    const uint8_t* nibbles = block + 16 + j / 2 * 32;
    for (int i = 0; i < 16; ++i) {
      r.codes[i] = static_cast<uint8_t>(j % 2 ? nibbles[i] >> 4 | (nibbles[i + 16] & 0xf0)
                                              : (nibbles[i] & 15) | nibbles[i + 16] << 4);
    }
    return r;
  }
  const uint8_t* block = row + group * block_bytes(encoding);
  const bool with_minimum = encoding == Encoding::Q4_1;
  r.scale = read_half(block);
  r.minimum = with_minimum ? read_half(block + 2) : -8.0f * r.scale;
  std::memcpy(r.codes, block + (with_minimum ? 4 : 2), sizeof r.codes);
  return r;
}

}  // namespace paceline
