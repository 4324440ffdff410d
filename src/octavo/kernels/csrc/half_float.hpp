// 16-bit floats of the IEEE kind as GGUF stores its scales, exactly.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo {

static inline float from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest < 0x0400u) {  // zero and denormals: rest * 2^-24
    const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -small : small;
  }
  const uint32_t bits = sign | (rest >= 0x7c00u ? 0x7f800000u | (rest & 0x3ffu) << 13 : (rest << 13) + (112u << 23));
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace octavo
