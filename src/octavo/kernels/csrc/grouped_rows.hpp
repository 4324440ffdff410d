// Rows of x rounded to int8 in groups of 32, in the order in which a tile reads them (grouped_tile.hpp).
//
// A group's scale is its largest absolute value / 127. Groups below 2^-120 count as zeros; one with a number that is not
// finite gets a scale of NaN, so that it reaches every output of its row.
#pragma once
#include "grouped_tile.hpp"

namespace octavo {
namespace OCTAVO_ISA {

struct RoundedGroup {
  int8_t codes[kGroupInputs];
  float scale;
  int32_t sum;  // of the codes
};

constexpr uint32_t kLeastBits = 7u << 23;  // 2^-120: there, 127 / x is still finite

OCTAVO_INLINE void round_group(const float* x, RoundedGroup& out) {
  uint32_t bits[kGroupInputs];
  std::memcpy(bits, x, sizeof bits);
  int32_t most = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t magnitude = static_cast<int32_t>(bits[i] & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  if (most < static_cast<int32_t>(kLeastBits) || most >= 0x7f800000) {
    std::memset(out.codes, 0, sizeof out.codes);
    out.scale = most >= 0x7f800000 ? __builtin_nanf("") : 0.f;
    out.sum = 0;
    return;
  }
  float largest;
  std::memcpy(&largest, &most, 4);
  const float inverse = 127.f / largest;
  int32_t sum = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const float shifted = x[i] * inverse + 12582912.f;  // rounds to nearest even: no bits are left for a fraction
    int32_t code;
    std::memcpy(&code, &shifted, 4);
    code -= 0x4b400000;
    out.codes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  out.scale = largest / 127.f;
  out.sum = sum;
}

template <WeightsDtype kDtype>
static void round_rows(const float* x, int num_inputs, int rows, void* packed) {
  for (int row = 0; row < rows; row++) {
    const float* from = x + static_cast<size_t>(row) * num_inputs;
    int32_t* out = static_cast<int32_t*>(packed) + row;
    for (int first = 0; first < num_inputs; first += kGroupInputs) {
      RoundedGroup group;
      if (num_inputs - first >= kGroupInputs) {
        round_group(from + first, group);
      } else {
        float padded[kGroupInputs] = {};
        std::memcpy(padded, from + first, static_cast<size_t>(num_inputs - first) * 4);
        round_group(padded, group);
      }
      int32_t words[kGroupUnits + 2];
      std::memcpy(words, group.codes, sizeof group.codes);
      std::memcpy(words + kGroupUnits, &group.scale, 4);
      const float minimum_factor = group.scale * static_cast<float>(group.sum);
      words[kGroupUnits + 1] = -lane_offset(kDtype) * group.sum;
      if (kDtype == WeightsDtype::int4_min) std::memcpy(words + kGroupUnits + 1, &minimum_factor, 4);
      for (int i = 0; i < kGroupUnits + 2; i++) out[i * rows] = words[i];
      out += (kGroupUnits + 2) * rows;
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
