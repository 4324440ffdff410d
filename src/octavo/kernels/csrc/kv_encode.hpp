// How a token's K and V become the bytes of its slot: the codecs of kv_formats, bit for bit. Two tokens of one tile may
// be written by different threads: every store touches bytes of its own token only.
#pragma once
#include "half_float.hpp"
#include "kv_tile.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kMaxVector = 640;  // numbers of a head or latent

// kv_formats/small_float.py; kFraction bits of fraction
template <int kFraction>
OCTAVO_INLINE uint8_t to_fp8(float x) {
  constexpr int kDrop = 23 - kFraction;
  constexpr int kBias = kFraction == 3 ? 7 : 15;
  constexpr uint32_t kSmallest = static_cast<uint32_t>(127 + 1 - kBias) << 23;           // the least normal number
  constexpr uint32_t kStep = static_cast<uint32_t>(127 + 1 - kBias - kFraction + 23) << 23;  // has the step of denormals
  constexpr uint32_t kLargest = kFraction == 3 ? 0x7eu : 0x7bu;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
  uint32_t code;
  if (size >= 0x7f800000u) {
    code = size == 0x7f800000u && kFraction == 2 ? 0x7cu : 0x7fu;
  } else if (size < kSmallest) {
    float small, step;
    std::memcpy(&small, &size, 4);
    std::memcpy(&step, &kStep, 4);
    small += step;
    uint32_t rounded;
    std::memcpy(&rounded, &small, 4);
    code = rounded - kStep;
  } else {
    code = ((size + ((1u << (kDrop - 1)) - 1u) + (size >> kDrop & 1u)) >> kDrop) - (static_cast<uint32_t>(127 - kBias) << kFraction);
    code = code < kLargest ? code : kLargest;
  }
  return static_cast<uint8_t>(sign | code);
}

template <int kFraction>
OCTAVO_INLINE float from_fp8(uint8_t code) {
  constexpr int kBias = kFraction == 3 ? 7 : 15, kDrop = 23 - kFraction;
  constexpr uint32_t kStep = static_cast<uint32_t>(127 + 1 - kBias - kFraction) << 23;  // of denormals
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, size = code & 0x7f;
  uint32_t bits;
  float value;
  if (size < 1u << kFraction) {
    std::memcpy(&value, &kStep, 4);
    value *= static_cast<float>(size);
    std::memcpy(&bits, &value, 4);
  } else if (kFraction == 3 ? size == 0x7f : size >= 0x7c) {
    bits = 0x7f800000u | (kFraction == 3 ? 0x400000u : (size & 3u) << kDrop);
  } else {
    bits = (size << kDrop) + (static_cast<uint32_t>(127 - kBias) << 23);
  }
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The largest of the absolute values as bits: those of infinities and NaNs are larger than all others.
OCTAVO_INLINE uint32_t largest_bits(const float* x, int count) {
  uint32_t largest = 0;
  for (int d = 0; d < count; d++) {
    uint32_t bits;
    std::memcpy(&bits, x + d, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

constexpr uint16_t kNanScale = 0x7fc0;

// kv_formats/int8.py: codes [kMaxVector], and the bits of the scale
static inline uint16_t to_int8(const float* x, int count, uint8_t* codes) {
  const uint32_t bits = largest_bits(x, count);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const uint16_t scale_bits = bits < 0x7f800000u ? to_bf16(largest / 127.f) : kNanScale;
  const float scale = from_bf16(scale_bits);
  if (!(scale > 0.f)) {
    std::memset(codes, 0, kMaxVector);
    return scale_bits;
  }
  const F16 divisor = set1(scale);
  for (int d = 0; d < count; d += 16) {
    alignas(64) float steps[16];
    store(steps, max(set1(-127.f), min(set1(127.f), round_nearest(div(load(x + d), divisor)))));
    for (int i = 0; i < 16; i++) codes[d + i] = static_cast<uint8_t>(static_cast<int8_t>(static_cast<int32_t>(steps[i])));
  }
  return scale_bits;
}

// kv_formats/k8v4.py: codes [kMaxVector], a byte each, and the bits of scale and minimum
static inline void to_int4(const float* x, int count, uint8_t* codes, uint16_t* scale_bits, uint16_t* low_bits) {
  float low = x[0], high = x[0];
  for (int d = 1; d < count; d++) {
    low = x[d] < low ? x[d] : low;
    high = x[d] > high ? x[d] : high;
  }
  *scale_bits = to_bf16((high - low) / 15.f);
  *low_bits = to_bf16(low);
  const float scale = from_bf16(*scale_bits), minimum = from_bf16(*low_bits);
  const bool finite = largest_bits(x, count) < 0x7f800000u && scale - scale == 0.f && minimum - minimum == 0.f;
  if (!finite) *scale_bits = *low_bits = kNanScale;
  if (!finite || !(scale > 0.f)) {
    std::memset(codes, 0, kMaxVector);
    return;
  }
  const F16 divisor = set1(scale), from = set1(minimum);
  for (int d = 0; d < count; d += 16) {
    alignas(64) float steps[16];
    store(steps, max(zero(), min(set1(15.f), round_nearest(div(sub(load(x + d), from), divisor)))));
    for (int i = 0; i < 16; i++) codes[d + i] = static_cast<uint8_t>(static_cast<int32_t>(steps[i]));
  }
}

// kv_formats/int4.py: a K tile of bf16 [head_dim / 2][16][2] -> codes [head_dim / 8][16][4], scales, minima
static inline void encode_k4(const uint8_t* from, int head_dim, uint8_t* tile) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(tile + head_dim * 8);
  for (int d = 0; d < head_dim; d++) {
    const uint8_t* words = from + d / 2 * 64;
    alignas(64) float channel[kTileTokens];
    store(channel, d % 2 ? high_bf16(words) : low_bf16(words));
    uint8_t codes[kMaxVector];
    to_int4(channel, kTileTokens, codes, scales + d, scales + head_dim + d);
    uint8_t* to = tile + d / 8 * 64 + d % 4;
    for (int token = 0; token < kTileTokens; token++) {
      if (d % 8 < 4) to[token * 4] = codes[token];
      else to[token * 4] |= static_cast<uint8_t>(codes[token] << 4);
    }
  }
}

// The codes of formats with 8 bits a number (of k8v4: K's). Returns whether each token has a scale, which is set then.
static inline bool to_codes(KVFormat format, const float* x, int count, uint8_t* codes, uint16_t* scale_bits) {
  if (format == KVFormat::fp8_e4m3) {
    for (int d = 0; d < count; d++) codes[d] = to_fp8<3>(x[d]);
  } else if (format == KVFormat::fp8_e5m2) {
    for (int d = 0; d < count; d++) codes[d] = to_fp8<2>(x[d]);
  } else {
    *scale_bits = to_int8(x, count, codes);
    return true;
  }
  return false;
}

static inline void to_16_bits(KVFormat format, const float* x, int count, uint16_t* bits) {
  if (format == KVFormat::bf16) {
    for (int d = 0; d < count; d += 16) store_bf16(bits + d, load(x + d));
  } else {
    for (int d = 0; d < count; d++) bits[d] = to_f16(x[d]);
  }
}

// Every other of 2 * count numbers: those between belong to another token.
static inline void store_every_other(const uint16_t* bits, int count, uint16_t* to) {
#if defined(__AVX512BW__)
  for (int d = 0; d < count; d += 16)
    _mm512_mask_storeu_epi16(to + 2 * d, 0x55555555u,
                             _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + d))));
#else
  for (int d = 0; d < count; d++) to[d * 2] = bits[d];
#endif
}

// slot 0 .. 15 of a K tile
static inline void encode_k(KVFormat format, const float* k, int head_dim, int slot, uint8_t* tile) {
  if (format == KVFormat::f32) {  // [head_dim][16]
    float* to = reinterpret_cast<float*>(tile);
    for (int d = 0; d < head_dim; d++) to[d * kTileTokens + slot] = k[d];
  } else if (format == KVFormat::bf16 || format == KVFormat::f16) {  // [head_dim / 2][16][2]
    uint16_t* to = reinterpret_cast<uint16_t*>(tile) + slot * 2;
    uint16_t bits[kMaxVector];
    to_16_bits(format, k, head_dim, bits);
    for (int d = 0; d < head_dim; d += 2) std::memcpy(to + d * kTileTokens, bits + d, 4);
  } else {  // [head_dim / 4][4][2][4][2] (kv_formats/quads.py)
    uint8_t codes[kMaxVector];
    uint16_t scale;
    const bool scaled = to_codes(format, k, head_dim, codes, &scale);
    uint8_t* to = tile + slot / 4 * 16 + slot % 4 * 2;
    for (int d = 0; d < head_dim; d += 4) {
      std::memcpy(to + d * kTileTokens, codes + d, 2);
      std::memcpy(to + d * kTileTokens + 8, codes + d + 2, 2);
    }
    if (scaled) std::memcpy(tile + head_dim * kTileTokens + slot * 2, &scale, 2);
  }
}

// slot 0 .. 15 of a V tile
static inline void encode_v(KVFormat format, const float* v, int head_dim, int slot, uint8_t* tile) {
  uint8_t codes[kMaxVector];
  uint16_t scale, minimum;
  if (format == KVFormat::f32) {  // [16][head_dim]
    std::memcpy(tile + static_cast<size_t>(slot) * head_dim * 4, v, static_cast<size_t>(head_dim) * 4);
  } else if (format == KVFormat::bf16 || format == KVFormat::f16) {  // [8][head_dim][2]
    uint16_t* to = reinterpret_cast<uint16_t*>(tile) + slot / 2 * head_dim * 2 + slot % 2;
    uint16_t bits[kMaxVector];
    to_16_bits(format, v, head_dim, bits);
    store_every_other(bits, head_dim, to);
  } else if (has_v4(format)) {  // [4][head_dim / 32][16][4]
    to_int4(v, head_dim, codes, &scale, &minimum);
    uint8_t* to = tile + slot / 4 * head_dim * 2 + slot % 4;
    for (int d = 0; d < head_dim; d += 32)
      for (int i = 0; i < 16; i++) to[(d / 2 + i) * 4] = static_cast<uint8_t>(codes[d + i] | codes[d + 16 + i] << 4);
    std::memcpy(tile + head_dim * 8 + slot * 2, &scale, 2);
    std::memcpy(tile + head_dim * 8 + 2 * kTileTokens + slot * 2, &minimum, 2);
  } else {  // [4][head_dim / 16][4][2][4][2]
    const bool scaled = to_codes(format, v, head_dim, codes, &scale);
    uint8_t* to = tile + v_codes_offset(format) + slot / 4 * head_dim * 4 + slot % 4 / 2 * 8 + slot % 2;
    for (int d = 0; d < head_dim; d += 4)
      for (int i = 0; i < 4; i++) to[d * 4 + i * 2] = codes[d + i];
    if (scaled) std::memcpy(tile + slot * 2, &scale, 2);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
