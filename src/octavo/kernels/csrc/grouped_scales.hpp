// Scales of activations, and their products with scales of weights without a multiplication, which in a tile of many rows
// is what its units of arithmetic have least time for.
//
// A scale of activations is 2^e * (1 + i / 4). For a group of a panel, entry i of a table is the bits of weight scale *
// (1 + i / 4), rounded to f32, less the bits of 1 + i / 4. The bits of an activation's scale and of its entry, added as
// integers, are those of the product of the two scales, as a multiplication rounds it. That holds while the product is a
// normal number: for ordinary scales of weights (pack_groups.hpp) and of activations (`is_ordinary_scale`).
#pragma once
#include "group_lanes.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kScaleSizes = 4;
constexpr uint32_t kScaleStep = (1u << 23) / kScaleSizes;  // of a scale's bits
constexpr uint32_t kLeastOrdinary = (127u - 60u) << 23, kMostOrdinary = (127u + 60u) << 23;  // 2^-60, 2^60
constexpr size_t kScaleTableWords = kScaleSizes * kLanes;  // of a group of a panel

OCTAVO_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

template <class Bits>
OCTAVO_INLINE float as_float(Bits bits) {
  static_assert(sizeof bits == 4);
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// The least scale that is not below largest * (1 / most), where 1 / most is a float.
OCTAVO_INLINE float scale_of(float largest, int most) {
  return as_float((bits_of(largest * (1.f / static_cast<float>(most))) + kScaleStep - 1) & ~(kScaleStep - 1));
}

// 1 / scale, as a division rounds it.
OCTAVO_INLINE float inverse_of(float scale) {
  static constexpr float kInverses[kScaleSizes] = {1.f, 1.f / 1.25f, 1.f / 1.5f, 1.f / 1.75f};
  const uint32_t bits = bits_of(scale), power = bits >> 23;
  if (__builtin_expect(power == 0, 0)) return 1.f / scale;  // not a normal number
  return as_float(bits_of(kInverses[bits / kScaleStep % kScaleSizes]) - ((power - 127) << 23));
}

OCTAVO_INLINE bool is_ordinary_scale(float scale) { return bits_of(scale) - kLeastOrdinary <= kMostOrdinary - kLeastOrdinary; }

template <WeightsDtype kDtype>
OCTAVO_INLINE F16 load_weight_scales(const uint8_t* group) {
  return has_minima(kDtype) ? load_f16(group) : load(reinterpret_cast<const float*>(group));
}

#if defined(__AVX512F__)
constexpr bool kHasScaleTables = true;

// Of a group of a panel: [4][16].
template <WeightsDtype kDtype>
OCTAVO_INLINE void fill_scales(const uint8_t* group, int32_t* out) {
  const __m512 scales = load_weight_scales<kDtype>(group).v;
#pragma GCC unroll 4
  for (int i = 0; i < kScaleSizes; i++, out += kLanes) {
    const __m512 size = _mm512_set1_ps(1.f + static_cast<float>(i) / kScaleSizes);
    _mm512_store_si512(out, _mm512_sub_epi32(_mm512_castps_si512(_mm512_mul_ps(scales, size)), _mm512_castps_si512(size)));
  }
}

template <WeightsDtype>
OCTAVO_INLINE F16 scales_from_table(const int32_t* entries, int32_t bits) {
  const __m512i entry = _mm512_load_si512(entries + (static_cast<uint32_t>(bits) / kScaleStep % kScaleSizes) * kLanes);
  return {_mm512_castsi512_ps(_mm512_add_epi32(entry, _mm512_set1_epi32(bits)))};
}
#else
constexpr bool kHasScaleTables = false;
template <WeightsDtype>
void fill_scales(const uint8_t* group, int32_t* out);
template <WeightsDtype>
F16 scales_from_table(const int32_t* entries, int32_t bits);
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
