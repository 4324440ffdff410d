// Sums of products of a group, in a register tile: which tiles there are, how their x lies in memory, and what adds up
// codes. Sums are exact integers.
#pragma once
#include "crossed_products.hpp"
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// The largest tiles that the registers hold.
#if defined(__AVX512F__)
constexpr int kMaxGroupedRows = 6;
constexpr int max_grouped_panels(int rows) { return rows <= 3 ? 4 : 2; }
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kMaxGroupedRows = 4;
constexpr int max_grouped_panels(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int kMaxGroupedRows = 2;
constexpr int max_grouped_panels(int) { return 1; }
#endif

// Packed x of a tile: for each group an int32 of bits, [rows][8 units] of four bytes, [rows] f32 scales, [rows] offsets: what
// the codes' offset adds to a sum, negated (int32); or, where weights have a minimum, scale * sum of the rounded x (f32).
// Bit r says that row r is rounded finely in this group: its codes are 128 * high + low. The high bytes, [groups][rows]
// [8 units], lie apart; they are read where any bit is set, and are zeros for the other rows: zeros change no sum.
// kMarked says that a scale is not ordinary (grouped_scales.hpp).
// Where minima are whole numbers, the offsets are what they are multiplied by, as for other minima, and behind all groups
// lie these once more, but for finely rounded groups: as int16 in a power of 2, [groups / 2][rows] pairs and [rows] f32 units.
constexpr int32_t kMarked = 1 << 30;
// Where products are crossed (crossed_products.hpp), a group ends with what its rows take from their sums, negated, [rows] int32.
constexpr size_t x_group_words(int rows, bool crossed) { return 1 + static_cast<size_t>(kGroupUnits + (crossed ? 3 : 2)) * rows; }
constexpr size_t x_tile_words(WeightsDtype dtype, int groups, int rows, bool crossed) {
  const size_t factors = dtype == WeightsDtype::int4_whole_min ? static_cast<size_t>(groups / 2 + 1) * rows : 0;
  return x_group_words(rows, crossed) * static_cast<size_t>(groups) + factors;
}
constexpr size_t x_high_words(int rows) { return static_cast<size_t>(kGroupUnits) * rows; }

template <WeightsDtype kDtype, int R, int P>
OCTAVO_INLINE void add_unit(I16 (&dots)[R][P], const Codes (&codes)[P], const int32_t* x) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) dots[r][p] = add_products<kDtype>(dots[r][p], codes[p], x[r * kGroupUnits]);
  }
}

template <WeightsDtype kDtype, int R, int P>
OCTAVO_INLINE void add_codes(I16 (&dots)[R][P], const uint8_t* w, size_t panel_bytes, const int32_t* x) {
  constexpr bool kHalves = kDtype != WeightsDtype::int8;
#pragma GCC unroll 8
  for (int unit = 0; unit < (kHalves ? kGroupUnits / 2 : kGroupUnits); unit++) {
    Codes codes[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) codes[p] = load_codes(w + static_cast<size_t>(p) * panel_bytes + unit * 64);
    if (!kHalves) {
      add_unit<kDtype, R, P>(dots, codes, x + unit);
      continue;
    }
    Codes half[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) half[p] = low_codes(codes[p]);
    add_unit<kDtype, R, P>(dots, half, x + unit);
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) half[p] = high_codes(codes[p]);
    add_unit<kDtype, R, P>(dots, half, x + unit + kGroupUnits / 2);
  }
}

// One row alone, with two sums for each panel.
template <WeightsDtype kDtype, int P>
OCTAVO_INLINE void add_row(I16 (&dots)[2][P], const uint8_t* w, size_t panel_bytes, const int32_t* x) {
  constexpr bool kHalves = kDtype != WeightsDtype::int8;
#pragma GCC unroll 8
  for (int unit = 0; unit < (kHalves ? kGroupUnits / 2 : kGroupUnits); unit++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      const Codes codes = load_codes(w + static_cast<size_t>(p) * panel_bytes + unit * 64);
      I16& even = dots[kHalves ? 0 : unit % 2][p];
      even = add_products<kDtype>(even, kHalves ? low_codes(codes) : codes, x[unit]);
      if (kHalves) dots[1][p] = add_products<kDtype>(dots[1][p], high_codes(codes), x[unit + kGroupUnits / 2]);
    }
}

constexpr int kFewRows = 2;  // of a tile, that are rounded finely in a group: see `add_high`

// offset: [R], null: none.
template <int R, int P>
OCTAVO_INLINE void begin_dots(I16 (&dots)[R][P], const int32_t* offset) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) dots[r][p] = set1_int(offset ? offset[r] : 0);
  }
}

// The share of the high bytes, and the offsets. A call, since it is rare: the common way keeps all its registers. Where few rows
// are fine, those alone, each with two sums for a panel, so that none waits for the one before; mostly it is one row or all.
template <WeightsDtype kDtype, int R, int P>
__attribute__((noinline, cold)) static void add_high(I16 (&out)[R][P], const uint8_t* w, size_t panel_bytes, const int32_t* x,
                                                     const int32_t* high, const int32_t* offset) {
  if (__builtin_popcount(static_cast<unsigned>(*x & (kMarked - 1))) > kFewRows) {
    I16 dots[R][P];
    begin_dots<R, P>(dots, nullptr);
    add_codes<kDtype, R, P>(dots, w, panel_bytes, high);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) out[r][p] = add_int(times_128(dots[r][p]), set1_int(offset ? offset[r] : 0));
    }
    return;
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) out[r][p] = set1_int(offset ? offset[r] : 0);
  for (int fine = *x & (kMarked - 1); fine; fine &= fine - 1) {
    const int r = __builtin_ctz(static_cast<unsigned>(fine));
    I16 dots[2][P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) dots[0][p] = dots[1][p] = set1_int(0);
    add_row<kDtype, P>(dots, w, panel_bytes, high + r * kGroupUnits);
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) out[r][p] = add_int(times_128(add_int(dots[0][p], dots[1][p])), out[r][p]);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
