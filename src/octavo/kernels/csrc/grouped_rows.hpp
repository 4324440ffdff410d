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

// What is said of a group whose scale would not be a good number: zeros, or NaN.
static inline void round_strange_group(int32_t most, RoundedGroup& out) {
  std::memset(out.codes, 0, sizeof out.codes);
  out.scale = most >= 0x7f800000 ? __builtin_nanf("") : 0.f;
  out.sum = 0;
}

#if defined(__AVX512F__)
template <int kHalf>
OCTAVO_INLINE __m256i half_of(__m512i v) {
  return _mm512_maskz_extracti64x4_epi64(0xf, v, kHalf);
}

OCTAVO_INLINE int32_t reduce_max(__m512i v) {
  const __m256i a = _mm256_max_epi32(half_of<0>(v), half_of<1>(v));
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

OCTAVO_INLINE int32_t reduce_sum(__m512i v) {
  const __m256i a = _mm256_add_epi32(half_of<0>(v), half_of<1>(v));
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

OCTAVO_INLINE void round_group(const float* x, RoundedGroup& out) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i a_bits = _mm512_and_si512(_mm512_castps_si512(a), magnitude);
  const __m512i b_bits = _mm512_and_si512(_mm512_castps_si512(b), magnitude);
  const int32_t most = reduce_max(_mm512_maskz_max_epi32(0xffff, a_bits, b_bits));
  if (most < static_cast<int32_t>(kLeastBits) || most >= 0x7f800000) return round_strange_group(most, out);
  float largest;
  std::memcpy(&largest, &most, 4);
  const __m512 inverse = _mm512_set1_ps(127.f / largest);
  const __m512i low = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(a, inverse));  // to nearest even, as below
  const __m512i high = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(b, inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes), _mm512_maskz_cvtepi32_epi8(0xffff, low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes + 16), _mm512_maskz_cvtepi32_epi8(0xffff, high));
  out.scale = largest / 127.f;
  out.sum = reduce_sum(_mm512_add_epi32(low, high));
}
#else
OCTAVO_INLINE void round_group(const float* x, RoundedGroup& out) {
  uint32_t bits[kGroupInputs];
  std::memcpy(bits, x, sizeof bits);
  int32_t most = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t magnitude = static_cast<int32_t>(bits[i] & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  if (most < static_cast<int32_t>(kLeastBits) || most >= 0x7f800000) return round_strange_group(most, out);
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
#endif

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
