// 16-bit floats of the IEEE kind (scales in GGUF, KV in f16), exactly.
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

// float -> half, nearest even; what is too large becomes an infinity, a NaN the quiet one of its sign.
static inline uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520: half way beyond 65504
  if (size < 0x38800000u) {  // below 2^-14: adding 1/2 leaves steps of 2^-24
    float small;
    std::memcpy(&small, &size, 4);
    small += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &small, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((size + 0xfffu + (size >> 13 & 1u)) - 0x38000000u) >> 13);
}

}  // namespace octavo
