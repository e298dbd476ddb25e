// How checkpoints store numbers, and what they mean. Formulas: the GGUF specification's quantisation types.
#pragma once
#include <cstdint>
#include <string_view>

namespace paceline {

enum class Encoding { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

// Throws std::invalid_argument for an unknown name.
Encoding parse_encoding(std::string_view name);

int block_elements(Encoding encoding);
int block_bytes(Encoding encoding);
inline int64_t row_bytes(Encoding encoding, int64_t elements) {
  return elements / block_elements(encoding) * block_bytes(encoding);
}

float half_to_float(uint16_t half);
uint16_t float_to_half(float x);  // to nearest, ties to even
inline float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float r;
  __builtin_memcpy(&r, &bits, sizeof r);
  return r;
}

// `elements` numbers of a row, from its start (a multiple of the block).
void decode(Encoding encoding, const uint8_t* data, int64_t elements, float* out);

// A group of 32 as code * scale + minimum, codes 0..15; for Q4_0, Q4_1 and Q4_K.
struct NibbleGroup {
  uint8_t codes[16];  // low halves: elements 0..15, high halves: elements 16..31
  float scale, minimum;
  int code(int i) const { return i < 16 ? codes[i] & 15 : codes[i - 16] >> 4; }
};
NibbleGroup nibble_group(Encoding encoding, const uint8_t* row, int64_t group);

}  // namespace paceline
