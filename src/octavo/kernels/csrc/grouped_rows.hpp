// Rows of x rounded in groups of 32, in the order in which a tile reads them (grouped_tile.hpp): to int8, outlying groups finer.
//
// A group's scale is its largest absolute value / 127. Where that is more than kOutlying times the mean of the row's groups',
// the group would bring most of the row's error: it is rounded in steps of a 128th of that scale, to 15 bits. Groups below
// 2^-120 count as zeros; one with a number that is not finite gets a scale of NaN, so that it reaches every output of its row.
#pragma once
#include <type_traits>

#include "grouped_tile.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kOutlying = 4.f;
constexpr uint32_t kLeastBits = 7u << 23;  // 2^-120: there, 127 / x is still finite
constexpr int32_t kInfinityBits = 0x7f800000;

struct RoundedGroup {
  int8_t codes[kGroupInputs];
  float scale;
  int32_t sum;  // of the codes
};

struct FineGroup {
  int8_t low[kGroupInputs], high[kGroupInputs];  // codes are 128 * high + low
  float scale;
  int32_t sum;
};

static inline float as_float(int32_t bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// To nearest even, for magnitudes below 2^22: no bits are left for a fraction.
OCTAVO_INLINE int32_t round_to_int(float x) {
  const float shifted = x + 12582912.f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
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

// The bits of the largest magnitude; of infinity or more where a number is not finite.
OCTAVO_INLINE int32_t largest_bits(const float* x) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), magnitude), b = _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude);
  return reduce_max(_mm512_maskz_max_epi32(0xffff, a, b));
}

OCTAVO_INLINE void round_group(const float* x, float largest, RoundedGroup& out) {
  const __m512 inverse = _mm512_set1_ps(127.f / largest);
  const __m512i low = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(_mm512_loadu_ps(x), inverse));  // to nearest even, as below
  const __m512i high = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes), _mm512_maskz_cvtepi32_epi8(0xffff, low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes + 16), _mm512_maskz_cvtepi32_epi8(0xffff, high));
  out.scale = largest / 127.f;
  out.sum = reduce_sum(_mm512_add_epi32(low, high));
}
#else
OCTAVO_INLINE int32_t largest_bits(const float* x) {
  uint32_t bits[kGroupInputs];
  std::memcpy(bits, x, sizeof bits);
  int32_t most = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t magnitude = static_cast<int32_t>(bits[i] & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

OCTAVO_INLINE void round_group(const float* x, float largest, RoundedGroup& out) {
  const float inverse = 127.f / largest;
  int32_t sum = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t code = round_to_int(x[i] * inverse);
    out.codes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  out.scale = largest / 127.f;
  out.sum = sum;
}
#endif

OCTAVO_INLINE void round_group(const float* x, float largest, FineGroup& out) {
  const float inverse = 127.f / largest;
  int32_t sum = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t code = round_to_int(x[i] * inverse * 128.f);
    const int32_t high = (code + 16448) / 128 - 128;  // to nearest; what is divided is not negative
    out.high[i] = static_cast<int8_t>(high);
    out.low[i] = static_cast<int8_t>(code - 128 * high);
    sum += code;
  }
  out.scale = largest / 127.f * 0.0078125f;
  out.sum = sum;
}

template <WeightsDtype kDtype, class Rounded>
OCTAVO_INLINE void put_group(const Rounded& group, const int8_t* codes, int32_t* to, size_t rows) {
  int32_t words[kGroupUnits + 2];
  std::memcpy(words, codes, kGroupInputs);
  std::memcpy(words + kGroupUnits, &group.scale, 4);
  const float minimum_factor = group.scale * static_cast<float>(group.sum);
  words[kGroupUnits + 1] = -lane_offset(kDtype) * group.sum;
  if (kDtype == WeightsDtype::int4_min) std::memcpy(words + kGroupUnits + 1, &minimum_factor, 4);
  for (int i = 0; i < kGroupUnits + 2; i++) to[i * rows] = words[i];
}

template <WeightsDtype kDtype>
OCTAVO_INLINE void put_fine_group(const float* x, float largest, int32_t* to, int32_t* high, size_t rows) {
  FineGroup group;
  round_group(x, largest, group);
  put_group<kDtype>(group, group.low, to, rows);
  int32_t words[kGroupUnits];
  std::memcpy(words, group.high, kGroupInputs);
  for (int i = 0; i < kGroupUnits; i++) high[i * rows] = words[i];
}

template <WeightsDtype kDtype>
OCTAVO_INLINE void put_coarse_group(const float* x, int32_t most, int32_t* to, size_t rows) {
  RoundedGroup group = {};
  if (most >= kInfinityBits) {
    group.scale = __builtin_nanf("");
  } else if (most >= static_cast<int32_t>(kLeastBits)) {
    round_group(x, as_float(most), group);
  }
  put_group<kDtype>(group, group.codes, to, rows);
}

template <WeightsDtype kDtype>
static void round_row(const float* x, int num_inputs, int row, int rows, int32_t* packed, int32_t* high) {
  const int groups = num_groups(num_inputs), rest = num_inputs % kGroupInputs;
  const size_t group_words = x_group_words(rows), stride = static_cast<size_t>(rows);
  float padded[kGroupInputs] = {};
  if (rest) std::memcpy(padded, x + num_inputs - rest, static_cast<size_t>(rest) * 4);
  const auto at = [&](int group) { return rest && group == groups - 1 ? padded : x + group * kGroupInputs; };
  float sum = 0.f;
  int32_t* most = packed + 1 + stride * kGroupUnits + row;  // kept where the scale goes
  for (int group = 0; group < groups; group++, most += group_words) sum += as_float(*most = largest_bits(at(group)));
  const float bound = kOutlying * (sum / static_cast<float>(groups));
  int32_t* to = packed + 1 + row;
  high += row;
  for (int group = 0; group < groups; group++, to += group_words, high += x_high_words(rows)) {
    const int32_t bits = to[stride * kGroupUnits];
    if (as_float(bits) > bound && bits >= static_cast<int32_t>(kLeastBits) && bits < kInfinityBits) {
      put_fine_group<kDtype>(at(group), as_float(bits), to, high, stride);
      packed[group_words * static_cast<size_t>(group)] |= 1 << row;
    } else {
      put_coarse_group<kDtype>(at(group), bits, to, stride);
    }
  }
}

template <WeightsDtype kDtype>
static void round_rows(const float* x, int num_inputs, int rows, int32_t* packed, int32_t* high) {
  const size_t groups = static_cast<size_t>(num_groups(num_inputs)), group_words = x_group_words(rows);
  for (size_t group = 0; group < groups; group++) packed[group * group_words] = 0;
  for (int row = 0; row < rows; row++) round_row<kDtype>(x + static_cast<size_t>(row) * num_inputs, num_inputs, row, rows, packed, high);
  for (size_t group = 0; group < groups; group++, high += x_high_words(rows)) {
    const int32_t fine = packed[group * group_words];
    for (int row = 0; fine && row < rows; row++)
      for (int i = 0; i < kGroupUnits && !(fine >> row & 1); i++) high[i * rows + row] = 0;
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
