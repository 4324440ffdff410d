// Rows of x rounded in groups of 32, in the order in which a tile reads them (grouped_tile.hpp): to int8, outlying groups finer.
//
// A group's scale is the least one (`scale_of`) for its largest absolute value to become 127 at most. Where the largest
// is more than kOutlying times the mean of the row's groups', the group would bring most of the row's error: it is rounded in
// steps of a 128th of that scale, to 15 bits. Groups below 2^-120 count as zeros; one with a number that is not finite gets a
// scale of NaN, so that it reaches every output of its row.
#pragma once
#include "grouped_tile.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kOutlying = 4.f;
constexpr uint32_t kLeastBits = 7u << 23;  // 2^-120: there, 1 / scale is still finite
constexpr int32_t kInfinityBits = 0x7f800000;

struct RoundedGroup {
  float scale;
  int32_t sum;  // of the codes
};

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

OCTAVO_INLINE RoundedGroup round_group(const float* x, float largest, int32_t* codes) {
  const float scale = scale_of(largest);
  const __m512 inverse = _mm512_set1_ps(inverse_of(scale));
  const __m512i low = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(_mm512_loadu_ps(x), inverse));  // to nearest even, as below
  const __m512i high = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_maskz_cvtepi32_epi8(0xffff, low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + kGroupUnits / 2), _mm512_maskz_cvtepi32_epi8(0xffff, high));
  return {scale, reduce_sum(_mm512_add_epi32(low, high))};
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

OCTAVO_INLINE RoundedGroup round_group(const float* x, float largest, int32_t* codes) {
  const float scale = scale_of(largest), inverse = inverse_of(scale);
  int8_t bytes[kGroupInputs];
  int32_t sum = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t code = round_to_int(x[i] * inverse);
    bytes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  std::memcpy(codes, bytes, kGroupInputs);
  return {scale, sum};
}
#endif

// Codes are 128 * high + low.
OCTAVO_INLINE RoundedGroup round_fine_group(const float* x, float largest, int32_t* low, int32_t* high) {
  const float scale = scale_of(largest), inverse = inverse_of(scale);
  int8_t low_bytes[kGroupInputs], high_bytes[kGroupInputs];
  int32_t sum = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t code = round_to_int(x[i] * inverse * 128.f);
    const int32_t quotient = (code + 16448) / 128 - 128;  // to nearest; what is divided is not negative
    high_bytes[i] = static_cast<int8_t>(quotient);
    low_bytes[i] = static_cast<int8_t>(code - 128 * quotient);
    sum += code;
  }
  std::memcpy(low, low_bytes, kGroupInputs);
  std::memcpy(high, high_bytes, kGroupInputs);
  return {scale * 0.0078125f, sum};
}

// most: the bits of the largest magnitude.
OCTAVO_INLINE RoundedGroup round_coarse_group(const float* x, int32_t most, int32_t* codes) {
  if (most >= static_cast<int32_t>(kLeastBits) && most < kInfinityBits) return round_group(x, as_float(most), codes);
  std::memset(codes, 0, kGroupInputs);
  return {most >= kInfinityBits ? __builtin_nanf("") : 1.f, 0};
}

template <WeightsDtype kDtype>
static void round_row(const float* x, int num_inputs, int row, int rows, int32_t* packed, int32_t* high) {
  const int groups = num_groups(num_inputs), rest = num_inputs % kGroupInputs;
  const size_t group_words = x_group_words(rows), codes_at = 1 + static_cast<size_t>(kGroupUnits) * row;
  const size_t scale_at = 1 + static_cast<size_t>(kGroupUnits) * rows + row, offset_at = scale_at + rows;
  float padded[kGroupInputs] = {};
  if (rest) std::memcpy(padded, x + num_inputs - rest, static_cast<size_t>(rest) * 4);
  const auto at = [&](int group) { return rest && group == groups - 1 ? padded : x + group * kGroupInputs; };
  float sum = 0.f;
  int32_t* to = packed;
  // the largest are kept where scales go
  for (int group = 0; group < groups; group++, to += group_words) {
    to[scale_at] = largest_bits(at(group));
    sum += as_float(to[scale_at]);
  }
  const float bound = kOutlying * (sum / static_cast<float>(groups));
  to = packed;
  high += kGroupUnits * row;
  for (int group = 0; group < groups; group++, to += group_words, high += x_high_words(rows)) {
    const int32_t most = to[scale_at];
    RoundedGroup rounded;
    if (as_float(most) > bound && most >= static_cast<int32_t>(kLeastBits) && most < kInfinityBits) {
      rounded = round_fine_group(at(group), as_float(most), to + codes_at, high);
      *to |= 1 << row;
    } else {
      rounded = round_coarse_group(at(group), most, to + codes_at);
      if (!is_ordinary_scale(rounded.scale)) *to |= kMarked;
    }
    const float minimum_factor = rounded.scale * static_cast<float>(rounded.sum);
    to[offset_at] = -lane_offset(kDtype) * rounded.sum;
    if (has_minima(kDtype)) std::memcpy(to + offset_at, &minimum_factor, 4);
    std::memcpy(to + scale_at, &rounded.scale, 4);
  }
}

// x lies between 2^it and twice that, but for what is smaller than normal numbers.
OCTAVO_INLINE int exponent_of(float x) { return static_cast<int>(bits_of(x) >> 23) - 127; }
OCTAVO_INLINE int exponent_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return static_cast<int>(bits >> 52) - 1023;
}

// What whole minima are multiplied by, behind the groups (grouped_tile.hpp). A row's factors are rounded in the least power of 2
// in which each has 16 bits, and no sum of products with minima of `minimum_bits` has more than 31. A group that is rounded
// finely is not among them: it may be so large that little would be left of the others.
static inline void round_factors(int groups, int rows, int minimum_bits, int32_t* packed) {
  const size_t group_words = x_group_words(rows), factor_at = group_words - static_cast<size_t>(rows);
  int32_t* out = packed + group_words * static_cast<size_t>(groups);
  double sizes[kMaxGroupedRows] = {};  // which finite numbers of f32 do not exceed
  float largest[kMaxGroupedRows] = {}, steps[kMaxGroupedRows];
  const auto factor_of = [&](const int32_t* group, int row) { return *group >> row & 1 ? 0.f : as_float(group[factor_at + row]); };
  const int32_t* from = packed;
  for (int group = 0; group < groups; group++, from += group_words)
    for (int row = 0; row < rows; row++) {
      const float size = __builtin_fabsf(factor_of(from, row));
      sizes[row] += static_cast<double>(size);
      largest[row] = size > largest[row] ? size : largest[row];
    }
  for (int row = 0; row < rows; row++) {
    const bool finite = sizes[row] - sizes[row] == 0.;
    const int by_sum = 29 - minimum_bits - exponent_of(sizes[row]), by_largest = 14 - exponent_of(largest[row]);
    const int least = by_sum < by_largest ? by_sum : by_largest, power = least < 126 ? least : 126;
    const float unit = as_float(static_cast<uint32_t>(127 - power) << 23);
    steps[row] = finite ? as_float(static_cast<uint32_t>(127 + power) << 23) : 0.f;
    out[groups / 2 * rows + row] = static_cast<int32_t>(bits_of(finite ? unit : __builtin_nanf("")));
  }
  const auto rounded = [&](const int32_t* group, int row) {
    if (steps[row] == 0.f) return 0;
    const int32_t whole = round_to_int(factor_of(group, row) * steps[row]);
    return whole < 32767 ? whole : 32767;
  };
  from = packed;
  for (int group = 0; group < groups; group += 2, from += 2 * group_words, out += rows)
    for (int row = 0; row < rows; row++)
      out[row] = static_cast<int32_t>((rounded(from, row) & 0xffff) | static_cast<uint32_t>(rounded(from + group_words, row)) << 16);
}

template <WeightsDtype kDtype>
static void round_rows(const float* x, int num_inputs, int rows, int minimum_bits, int32_t* packed, int32_t* high) {
  const size_t groups = static_cast<size_t>(num_groups(num_inputs)), group_words = x_group_words(rows);
  for (size_t group = 0; group < groups; group++) packed[group * group_words] = 0;
  for (int row = 0; row < rows; row++) round_row<kDtype>(x + static_cast<size_t>(row) * num_inputs, num_inputs, row, rows, packed, high);
  for (size_t group = 0; group < groups; group++, high += x_high_words(rows)) {
    const int32_t fine = packed[group * group_words] & (kMarked - 1);
    for (int row = 0; fine && row < rows; row++)
      if (!(fine >> row & 1)) std::memset(high + kGroupUnits * row, 0, kGroupInputs);
  }
  if (kDtype == WeightsDtype::int4_whole_min) round_factors(static_cast<int>(groups), rows, minimum_bits, packed);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
