// Rows of x rounded in groups of 32, in the order in which a tile reads them (grouped_sums.hpp): to int8, outlying groups finer.
//
// A group's scale is the least one (`scale_of`) for its largest absolute value to become `most_code` at most. Where the largest
// is more than kOutlying times the mean of the row's groups', the group would bring most of the row's error: it is rounded in
// steps of a 128th of that scale, to 15 bits. Groups below 2^-120 count as zeros; one with a number that is not finite gets a
// scale of NaN, so that it reaches every output of its row.
#pragma once
#include "grouped_sums.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kOutlying = 4.f;
constexpr uint32_t kLeastBits = 7u << 23;  // 2^-120: there, 1 / scale is still finite
constexpr int32_t kInfinityBits = 0x7f800000;

struct RoundedGroup {
  float scale;
  int32_t sum;    // of the codes
  int32_t taken;  // where products are crossed: what the row takes from its sums, negated
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

// Sixteen codes of inputs, to nearest even, as `round_to_int` rounds.
OCTAVO_INLINE __m512i round_lanes(__m512 x) { return _mm512_maskz_cvtps_epi32(0xffff, x); }

template <bool kCrossed>
OCTAVO_INLINE RoundedGroup store_codes(__m512i low, __m512i high, float scale, int32_t* codes) {
  __m128i a = _mm512_maskz_cvtepi32_epi8(0xffff, low);
  const __m128i b = _mm512_maskz_cvtepi32_epi8(0xffff, high);
  RoundedGroup rounded = {scale, 0, 0};
  if constexpr (kCrossed) {
    const RowSums sums = cross_row(a, b);
    rounded.sum = sums.codes;
    rounded.taken = sums.taken;
  } else {
    rounded.sum = reduce_sum(_mm512_add_epi32(low, high));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + kGroupUnits / 2), b);
  return rounded;
}

template <bool kCrossed>
OCTAVO_INLINE RoundedGroup round_group_by(const float* x, float scale, float inverse_scale, int32_t* codes) {
  const __m512 inverse = _mm512_set1_ps(inverse_scale);
  const __m512i low = round_lanes(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
  const __m512i high = round_lanes(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inverse));
  return store_codes<kCrossed>(low, high, scale, codes);
}

template <WeightsDtype kDtype, bool kCrossed>
OCTAVO_INLINE RoundedGroup round_group(const float* x, float largest, int32_t* codes) {
  const float scale = scale_of(largest, most_code(kDtype));
  return round_group_by<kCrossed>(x, scale, inverse_of(scale), codes);
}

// Codes are 128 * high + low.
template <WeightsDtype kDtype, bool kCrossed>
OCTAVO_INLINE RoundedGroup round_fine_group(const float* x, float largest, int32_t* low, int32_t* high) {
  const float scale = scale_of(largest, most_code(kDtype));
  const __m512 inverse = _mm512_set1_ps(inverse_of(scale)), steps = _mm512_set1_ps(128.f);
  __m512i code[2], rest[2];
  for (int i = 0; i < 2; i++) {
    code[i] = round_lanes(_mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), inverse), steps));
    const __m512i quotient = _mm512_maskz_srai_epi32(0xffff, _mm512_add_epi32(code[i], _mm512_set1_epi32(64)), 7);  // to nearest
    rest[i] = _mm512_sub_epi32(code[i], _mm512_maskz_slli_epi32(0xffff, quotient, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high) + i, _mm512_maskz_cvtepi32_epi8(0xffff, quotient));
  }
  RoundedGroup rounded = store_codes<kCrossed>(rest[0], rest[1], scale * 0.0078125f, low);
  rounded.sum = reduce_sum(_mm512_add_epi32(code[0], code[1]));
  return rounded;
}

// Scales of up to sixteen groups at once, and 1 / scale; of which groups they hold: of ordinary ones that are not rounded finely.
// most: the largest magnitudes.
template <WeightsDtype kDtype>
OCTAVO_INLINE uint32_t scales_of(const float* most, int count, float bound, float* scales, float* inverses) {
  const auto bits_at = [](uint32_t bits) { return _mm512_set1_epi32(static_cast<int32_t>(bits)); };
  const __mmask16 all = static_cast<__mmask16>((1u << count) - 1);
  const __m512 largest = _mm512_maskz_loadu_ps(all, most);
  const __m512 least = _mm512_mul_ps(largest, _mm512_set1_ps(1.f / static_cast<float>(most_code(kDtype))));
  const __m512i bits = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(least), bits_at(kScaleStep - 1)), bits_at(~(kScaleStep - 1)));
  const __m512 sizes = _mm512_castps128_ps512(_mm_setr_ps(1.f, 1.f / 1.25f, 1.f / 1.5f, 1.f / 1.75f));
  const __m512i size = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 21), bits_at(kScaleSizes - 1));
  static_assert(kScaleStep == 1u << 21 && kScaleSizes == 4);
  const __m512i power = _mm512_sub_epi32(_mm512_andnot_si512(bits_at((1u << 23) - 1), bits), bits_at(127u << 23));
  const __m512 inverse = _mm512_maskz_permutexvar_ps(0xffff, size, sizes);
  _mm512_storeu_si512(scales, bits);
  _mm512_storeu_si512(inverses, _mm512_sub_epi32(_mm512_castps_si512(inverse), power));
  const __m512i above = _mm512_sub_epi32(bits, bits_at(kLeastOrdinary));
  const __mmask16 ordinary = _mm512_cmp_epu32_mask(above, bits_at(kMostOrdinary - kLeastOrdinary), _MM_CMPINT_LE);
  const __mmask16 coarse = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(bound), _CMP_NGT_UQ);
  return all & ordinary & coarse;
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

template <WeightsDtype kDtype, bool kCrossed>
OCTAVO_INLINE RoundedGroup round_group(const float* x, float largest, int32_t* codes) {
  const float scale = scale_of(largest, most_code(kDtype)), inverse = inverse_of(scale);
  int8_t bytes[kGroupInputs];
  int32_t sum = 0;
  for (int i = 0; i < kGroupInputs; i++) {
    const int32_t code = round_to_int(x[i] * inverse);
    bytes[i] = static_cast<int8_t>(code);
    sum += code;
  }
  std::memcpy(codes, bytes, kGroupInputs);
  return {scale, sum, 0};
}

// Codes are 128 * high + low.
template <WeightsDtype kDtype, bool kCrossed>
OCTAVO_INLINE RoundedGroup round_fine_group(const float* x, float largest, int32_t* low, int32_t* high) {
  const float scale = scale_of(largest, most_code(kDtype)), inverse = inverse_of(scale);
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
  return {scale * 0.0078125f, sum, 0};
}

template <WeightsDtype>
OCTAVO_INLINE uint32_t scales_of(const float*, int, float, float*, float*) {
  return 0;  // groups are rounded one by one
}
template <bool>
RoundedGroup round_group_by(const float* x, float scale, float inverse_scale, int32_t* codes);
#endif

// most: the bits of the largest magnitude.
template <WeightsDtype kDtype, bool kCrossed>
OCTAVO_INLINE RoundedGroup round_coarse_group(const float* x, int32_t most, int32_t* codes) {
  if (most >= static_cast<int32_t>(kLeastBits) && most < kInfinityBits) return round_group<kDtype, kCrossed>(x, as_float(most), codes);
  std::memset(codes, 0, kGroupInputs);
  RoundedGroup rounded = {most >= kInfinityBits ? __builtin_nanf("") : 1.f, 0, 0};
  if constexpr (kCrossed) rounded.taken = cross_row(codes).taken;
  return rounded;
}

constexpr int kGroupsAtOnce = 512;  // of a row, whose scales are found together; in rows of more, one by one

template <WeightsDtype kDtype, bool kCrossed>
static void round_row(const float* x, int num_inputs, int row, int rows, int32_t* packed, int32_t* high) {
  const int groups = num_groups(num_inputs), rest = num_inputs % kGroupInputs;
  const size_t group_words = x_group_words(rows, kCrossed), codes_at = 1 + static_cast<size_t>(kGroupUnits) * row;
  const size_t scale_at = 1 + static_cast<size_t>(kGroupUnits) * rows + row, offset_at = scale_at + rows;
  float padded[kGroupInputs] = {};
  if (rest) std::memcpy(padded, x + num_inputs - rest, static_cast<size_t>(rest) * 4);
  const auto at = [&](int group) { return rest && group == groups - 1 ? padded : x + group * kGroupInputs; };
  const bool at_once = kHasScaleTables && groups <= kGroupsAtOnce;
  float most_of[kGroupsAtOnce], scales[kGroupsAtOnce], inverses[kGroupsAtOnce];
  uint32_t common[kGroupsAtOnce / kLanes] = {};
  float sum = 0.f;
  int32_t* to = packed;
  // the largest are kept where scales go
  for (int group = 0; group < groups; group++, to += group_words) {
    to[scale_at] = largest_bits(at(group));
    sum += as_float(to[scale_at]);
    if (at_once) most_of[group] = as_float(to[scale_at]);
  }
  const float bound = kOutlying * (sum / static_cast<float>(groups));
  for (int group = 0; at_once && group < groups; group += kLanes) {
    const int count = groups - group < kLanes ? groups - group : kLanes;
    common[group / kLanes] = scales_of<kDtype>(most_of + group, count, bound, scales + group, inverses + group);
  }
  to = packed;
  high += kGroupUnits * row;
  for (int group = 0; group < groups; group++, to += group_words, high += x_high_words(rows)) {
    const int32_t most = to[scale_at];
    RoundedGroup rounded;
    if (at_once && common[group / kLanes] >> group % kLanes & 1) {
      rounded = round_group_by<kCrossed>(at(group), scales[group], inverses[group], to + codes_at);
    } else if (as_float(most) > bound && most >= static_cast<int32_t>(kLeastBits) && most < kInfinityBits) {
      rounded = round_fine_group<kDtype, kCrossed>(at(group), as_float(most), to + codes_at, high);
      *to |= is_ordinary_scale(rounded.scale) ? 1 << row : kMarked | 1 << row;
    } else {
      rounded = round_coarse_group<kDtype, kCrossed>(at(group), most, to + codes_at);
      if (!is_ordinary_scale(rounded.scale)) *to |= kMarked;
    }
    const float minimum_factor = rounded.scale * static_cast<float>(rounded.sum);
    to[offset_at] = -lane_offset(kDtype) * rounded.sum;
    if (has_minima(kDtype)) std::memcpy(to + offset_at, &minimum_factor, 4);
    std::memcpy(to + scale_at, &rounded.scale, 4);
    if (kCrossed) to[offset_at + rows] = rounded.taken - code_offset(kDtype) * rounded.sum;
  }
}

// x lies between 2^it and twice that, but for what is smaller than normal numbers.
OCTAVO_INLINE int exponent_of(float x) { return static_cast<int>(bits_of(x) >> 23) - 127; }
OCTAVO_INLINE int exponent_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  return static_cast<int>(bits >> 52) - 1023;
}

constexpr int kFactorRows = 8;  // at least kMaxGroupedRows
static_assert(kFactorRows >= kMaxGroupedRows);

// Factors of a group: [rows], those of rows in `fine` count as 0. To `sizes` they are added, and `largest` becomes no less.
// steps: 0 for rows that are not finite. Of a pair, the first is the low half.
#if defined(__AVX512F__)
OCTAVO_INLINE void measure_factors(const int32_t* factors, int rows, int32_t fine, double* sizes, float* largest) {
  const __mmask16 rough = static_cast<__mmask16>(((1 << rows) - 1) & ~fine);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512 found = _mm512_castsi512_ps(_mm512_and_si512(_mm512_maskz_loadu_epi32(rough, factors), magnitude));
  const __m256 eight = _mm512_castps512_ps256(found);
  _mm512_storeu_pd(sizes, _mm512_add_pd(_mm512_loadu_pd(sizes), _mm512_maskz_cvtps_pd(0xff, eight)));
  _mm256_storeu_ps(largest, _mm256_max_ps(eight, _mm256_loadu_ps(largest)));  // what is no number changes nothing
}

OCTAVO_INLINE void round_pairs(const int32_t* first, const int32_t* second, size_t factor_at, int rows, const float* steps, int32_t* out) {
  const __mmask16 all = static_cast<__mmask16>((1 << rows) - 1);
  const __m512 step = _mm512_maskz_loadu_ps(all, steps);
  const __mmask16 finite = _mm512_cmp_ps_mask(step, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  const auto whole = [&](const int32_t* group) {
    const __m512 factors = _mm512_maskz_loadu_ps(static_cast<__mmask16>(finite & ~*group), group + factor_at);
    const __m512i rounded = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(factors, step));  // to nearest even
    return _mm512_maskz_min_epi32(0xffff, rounded, _mm512_set1_epi32(32767));
  };
  const __m512i low = _mm512_and_si512(whole(first), _mm512_set1_epi32(0xffff));
  _mm512_mask_storeu_epi32(out, all, _mm512_or_si512(low, _mm512_maskz_slli_epi32(0xffff, whole(second), 16)));
}
#else
OCTAVO_INLINE void measure_factors(const int32_t* factors, int rows, int32_t fine, double* sizes, float* largest) {
  for (int row = 0; row < rows; row++) {
    const float size = fine >> row & 1 ? 0.f : __builtin_fabsf(as_float(factors[row]));
    sizes[row] += static_cast<double>(size);
    largest[row] = size > largest[row] ? size : largest[row];
  }
}

OCTAVO_INLINE void round_pairs(const int32_t* first, const int32_t* second, size_t factor_at, int rows, const float* steps, int32_t* out) {
  for (int row = 0; row < rows; row++) {
    const auto whole = [&](const int32_t* group) {
      if (steps[row] == 0.f || *group >> row & 1) return 0;
      const int32_t rounded = round_to_int(as_float(group[factor_at + row]) * steps[row]);
      return rounded < 32767 ? rounded : 32767;
    };
    out[row] = static_cast<int32_t>((whole(first) & 0xffff) | static_cast<uint32_t>(whole(second)) << 16);
  }
}
#endif

// What whole minima are multiplied by, behind the groups (grouped_sums.hpp). A row's factors are rounded in the least power of 2
// in which each has 16 bits, and no sum of products with minima of `minimum_bits` has more than 31. A group that is rounded
// finely is not among them: it may be so large that little would be left of the others.
static inline void round_factors(int groups, int rows, int minimum_bits, size_t group_words, int32_t* packed) {
  const size_t factor_at = 1 + static_cast<size_t>(kGroupUnits + 1) * rows;
  int32_t* out = packed + group_words * static_cast<size_t>(groups);
  double sizes[kFactorRows] = {};  // which finite numbers of f32 do not exceed
  float largest[kFactorRows] = {}, steps[kFactorRows] = {};
  const int32_t* from = packed;
  for (int group = 0; group < groups; group++, from += group_words) measure_factors(from + factor_at, rows, *from, sizes, largest);
  for (int row = 0; row < rows; row++) {
    const bool finite = sizes[row] - sizes[row] == 0.;
    const int by_sum = 29 - minimum_bits - exponent_of(sizes[row]), by_largest = 14 - exponent_of(largest[row]);
    const int least = by_sum < by_largest ? by_sum : by_largest, power = least < 126 ? least : 126;
    const float unit = as_float(static_cast<uint32_t>(127 - power) << 23);
    steps[row] = finite ? as_float(static_cast<uint32_t>(127 + power) << 23) : 0.f;
    out[groups / 2 * rows + row] = static_cast<int32_t>(bits_of(finite ? unit : __builtin_nanf("")));
  }
  from = packed;
  for (int group = 0; group < groups; group += 2, from += 2 * group_words, out += rows)
    round_pairs(from, from + group_words, factor_at, rows, steps, out);
}

template <WeightsDtype kDtype, bool kCrossed>
static void round_rows(const float* x, int num_inputs, int rows, int minimum_bits, int32_t* packed, int32_t* high) {
  const size_t groups = static_cast<size_t>(num_groups(num_inputs)), group_words = x_group_words(rows, kCrossed);
  for (size_t group = 0; group < groups; group++) packed[group * group_words] = 0;
  for (int row = 0; row < rows; row++)
    round_row<kDtype, kCrossed>(x + static_cast<size_t>(row) * num_inputs, num_inputs, row, rows, packed, high);
  for (size_t group = 0; group < groups; group++, high += x_high_words(rows)) {
    const int32_t fine = packed[group * group_words] & (kMarked - 1);
    for (int row = 0; fine && row < rows; row++)
      if (!(fine >> row & 1)) std::memset(high + kGroupUnits * row, 0, kGroupInputs);
  }
  if (kDtype == WeightsDtype::int4_whole_min) round_factors(static_cast<int>(groups), rows, minimum_bits, group_words, packed);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
