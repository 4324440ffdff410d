// Half as many multiplications for the same whole numbers, where tiles of many rows share panels (S. Winograd, "A new
// algorithm for inner product", IEEE Transactions on Computers C-17, 1968).
//
// Of two inputs a and b: x_a * w_a + x_b * w_b = (x_a + w_b) * (x_b + w_a) - x_a * x_b - w_a * w_b. The last two belong to a
// row alone and to an output alone, and additions of bytes run on units that products leave idle. a is an input of units 0 to 3 of
// a group, b the same of units 4 to 7. Multiplied are bytes, the first without a sign: 120 is added to x_a and 8 taken from
// w_a. So codes of activations lie within -120 to 120 (`most_code`), and nothing overflows.
#pragma once
#include "grouped_scales.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kRaised = 120;  // what is added to x_a
static_assert(most_code(WeightsDtype::int4) == kRaised && kRaised + kRaised + 15 <= 255 && kRaised + 7 <= 127);
constexpr int kLowered = 8;   // what is taken from w_a
// Every second unit is crossed: products and additions then keep their units of arithmetic busy for about the same time.
constexpr bool is_crossed(int unit) { return unit % 2 != 0; }
constexpr int kCrossedInputs = kGroupInputs / 4;  // of each half of a group

// The sum of a row's codes in a group, and what the row takes from its sums, negated.
struct RowSums {
  int32_t codes, taken;
};

#if defined(__AVX512VNNI__)
constexpr bool crosses_products(WeightsDtype dtype) { return dtype != WeightsDtype::int8; }

// Of a group of a panel: [16] what an output takes from its sums, negated; [4 units][w_a - 8, w_b][64] bytes.
constexpr size_t kCrossedWords = (1 + kGroupUnits) * kLanes;

OCTAVO_INLINE void fill_crossed_codes(const uint8_t* codes, int32_t* out) {
  const __m512i raised = _mm512_set1_epi8(kRaised), lowered = _mm512_set1_epi8(kLowered);
  __m512i taken = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int unit = 0; unit < kGroupUnits / 2; unit++) {
    const Codes both = load_codes(codes + unit * 64);
    __m512i a = low_codes(both);
    const __m512i b = high_codes(both);
    if (is_crossed(unit)) {
      a = _mm512_sub_epi8(a, lowered);
      taken = _mm512_dpbusd_epi32(taken, _mm512_add_epi8(b, raised), a);
    }
    _mm512_store_si512(out + (1 + 2 * unit) * kLanes, a);
    _mm512_store_si512(out + (2 + 2 * unit) * kLanes, b);
  }
  _mm512_store_si512(out, _mm512_sub_epi32(_mm512_setzero_si512(), taken));
}

// a, b: the codes of units 0 to 3 and 4 to 7; of those that are crossed, a becomes a + 120.
OCTAVO_INLINE RowSums cross_row(__m128i& a, __m128i b) {
  const __m128i crossed = _mm_set_epi32(-1, 0, -1, 0), ones = _mm_set1_epi8(1), zeros = _mm_setzero_si128();
  const __m128i codes = _mm_dpbusd_epi32(_mm_dpbusd_epi32(zeros, ones, a), ones, b);
  a = _mm_add_epi8(a, _mm_and_si128(_mm_set1_epi8(kRaised), crossed));
  __m128i taken = _mm_dpbusd_epi32(zeros, a, _mm_and_si128(b, crossed));
  taken = _mm_dpbusd_epi32(taken, a, _mm_and_si128(_mm_set1_epi8(-kLowered), crossed));  // 8 * 120 * 8 too little
  __m128i both = _mm_add_epi32(_mm_unpacklo_epi32(codes, taken), _mm_unpackhi_epi32(codes, taken));
  both = _mm_add_epi32(both, _mm_shuffle_epi32(both, 0x4e));
  const int64_t pair = _mm_cvtsi128_si64(both);
  return {static_cast<int32_t>(pair), -(static_cast<int32_t>(pair >> 32) + kCrossedInputs * kRaised * kLowered)};
}

OCTAVO_INLINE RowSums cross_row(int32_t* codes) {
  __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const RowSums sums = cross_row(a, _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + kGroupUnits / 2)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), a);
  return sums;
}

// dots: of R rows and P panels; table: of each panel the codes, `words` apart; x: [R][8 units].
template <int R, int P>
OCTAVO_INLINE void add_crossed(I16 (&dots)[R][P], const int32_t* table, size_t words, const int32_t* x) {
#pragma GCC unroll 4
  for (int unit = 0; unit < kGroupUnits / 2; unit++) {
    __m512i a[P], b[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      a[p] = _mm512_load_si512(table + p * words + 2 * unit * kLanes);
      b[p] = _mm512_load_si512(table + p * words + (2 * unit + 1) * kLanes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512i first = _mm512_set1_epi32(x[r * kGroupUnits + unit]);
      const __m512i second = _mm512_set1_epi32(x[r * kGroupUnits + unit + kGroupUnits / 2]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) {
        __m512i& dot = dots[r][p].v;
        if (is_crossed(unit))
          dot = _mm512_dpbusd_epi32(dot, _mm512_add_epi8(first, b[p]), _mm512_add_epi8(second, a[p]));
        else
          dot = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(dot, a[p], first), b[p], second);
      }
    }
  }
}

template <int R, int P>
OCTAVO_INLINE void begin_crossed(I16 (&dots)[R][P], const int32_t* table, size_t words, const int32_t* taken) {
#pragma GCC unroll 4
  for (int p = 0; p < P; p++) {
    const __m512i of_outputs = _mm512_load_si512(table + p * words);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) dots[r][p].v = _mm512_add_epi32(of_outputs, _mm512_set1_epi32(taken[r]));
  }
}
#else
constexpr bool crosses_products(WeightsDtype) { return false; }
constexpr size_t kCrossedWords = 0;
void fill_crossed_codes(const uint8_t* codes, int32_t* out);
RowSums cross_row(int32_t* codes);
#if defined(__AVX512F__)
RowSums cross_row(__m128i& a, __m128i b);
#endif
template <int R, int P>
void add_crossed(I16 (&dots)[R][P], const int32_t* table, size_t words, const int32_t* x);
template <int R, int P>
void begin_crossed(I16 (&dots)[R][P], const int32_t* table, size_t words, const int32_t* taken);
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
