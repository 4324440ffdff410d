// The register tiles of linear layers with grouped weights: R rows by P panels of 16 outputs. Whatever the tile, the sum of
// a group is an exact integer, and groups are added in ascending order, one fused multiply-add each (and one more for
// minima: of each group, or of all where they are whole numbers), so all tiles give the same bits.
#pragma once
#include "exp_lanes.hpp"
#include "grouped_sums.hpp"
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// How a tile reads its panels: once, it alone, and fetches the next panels at the same rate; or as one of several, each of
// which fetches its share of what comes next; or so, with a table of products of scales; or with codes for crossed products too.
enum class TileReads { once, shared, with_table, crossed };

// What becomes of a tile's sums: kept apart as they are; stored or added to what is there, as rows of whole panels; or of
// two panels, gate and up, the gated activation is stored.
enum class TileEnd { keep, put, accumulate, gate };

struct GroupedTile {
  const uint8_t* weights;  // the first panel
  size_t panel_bytes;      // from one panel of the tile to the next
  const int32_t *x, *x_high;
  int groups;
  float* out;               // of rows `stride` apart; kept: [rows][panels][16]
  size_t stride;
  TileEnd end;
  const uint8_t* prefetch;  // what is wanted after this tile ...
  size_t prefetch_step;     // ... and how far to go in it with each group
  const int32_t* table;     // `fill_table` of these panels
  const float* units;       // of whole minima: those of the first panel
  size_t units_apart;       // from one panel of the tile to the next
};

// What tiles of many rows have of their panels, for each group of a panel: the products of scales; codes, where products are crossed.
constexpr size_t table_words(bool crossed) { return kScaleTableWords + (crossed ? kCrossedWords : 0); }

template <WeightsDtype kDtype, bool kCrossed>
static void fill_table(const uint8_t* weights, size_t panel_bytes, int panels, int groups, int32_t* out) {
  for (int group = 0; group < groups; group++, weights += group_bytes(kDtype)) {
    for (int panel = 0; panel < panels; panel++, out += table_words(kCrossed)) {
      const uint8_t* from = weights + static_cast<size_t>(panel) * panel_bytes;
      fill_scales<kDtype>(from, out);
      if constexpr (kCrossed) fill_crossed_codes(from + kGroupScaleBytes, out + kScaleTableWords);
    }
  }
}

// table: of this group, of kTableWords for each panel; 0: scales are multiplied.
template <WeightsDtype kDtype, int R, int P, size_t kTableWords>
OCTAVO_INLINE void add_scaled(F16 (&sum)[R][P], const I16 (&dots)[R][P], const uint8_t* w, size_t panel_bytes, const int32_t* scale,
                              const int32_t* table) {
  constexpr bool kTable = kTableWords != 0;
  constexpr bool kMinimum = kDtype == WeightsDtype::int4_min;
  const float* rest = reinterpret_cast<const float*>(scale) + R;
#pragma GCC unroll 4
  for (int p = 0; p < P; p++) {
    const uint8_t* from = w + static_cast<size_t>(p) * panel_bytes;
    F16 weight_scale = zero();
    if constexpr (!kTable) weight_scale = load_weight_scales<kDtype>(from);
    const F16 minimum = kMinimum ? load_f16(from + kGroupScaleBytes / 2) : zero();
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      F16 both;
      if constexpr (kTable)
        both = scales_from_table<kDtype>(table + p * kTableWords, scale[r]);
      else
        both = mul(weight_scale, set1(as_float(scale[r])));
      sum[r][p] = fma(to_float(dots[r][p]), both, sum[r][p]);
      if (kMinimum) sum[r][p] = fma(minimum, set1(rest[r]), sum[r][p]);
    }
  }
}

// What whole minima bring to rows that are rounded finely in a group: in f32, so that one large number costs the others of
// its row nothing. A call, as `add_high` is.
template <WeightsDtype kDtype, int R, int P>
__attribute__((noinline, cold)) static void add_fine_minima(F16 (&sum)[R][P], const GroupedTile& tile, int group, const int32_t* x) {
  constexpr size_t kBytes = group_bytes(kDtype);
  const uint8_t* w = tile.weights + static_cast<size_t>(group / 2 * 2) * kBytes + kGroupScaleBytes / 2;
  const int32_t* factor = x + 1 + kGroupUnits * R + R;
  for (int p = 0; p < P; p++) {
    const Codes pairs = load_minima(w + static_cast<size_t>(p) * tile.panel_bytes, kBytes);
    const F16 whole = to_float(group % 2 ? second_of_pairs(pairs) : first_of_pairs(pairs));
    const F16 minimum = mul(whole, load(tile.units + static_cast<size_t>(p) * tile.units_apart));
    for (int fine = *x & (kMarked - 1); fine; fine &= fine - 1) {  // mostly one row
      const int r = __builtin_ctz(static_cast<unsigned>(fine));
      sum[r][p] = fma(minimum, set1(as_float(factor[r])), sum[r][p]);
    }
  }
}

// kFineMinima: what `add_fine_minima` adds is not there yet.
template <WeightsDtype kDtype, int R, int P, bool kFineMinima = kDtype == WeightsDtype::int4_whole_min>
OCTAVO_INLINE void add_group(F16 (&sum)[R][P], const GroupedTile& tile, int group, const uint8_t* w, const int32_t* x,
                             const int32_t* high) {
  const size_t panel_bytes = tile.panel_bytes;
  const int32_t *codes = x + 1, *scale = codes + kGroupUnits * R;
  I16 dots[R][P];
  if (__builtin_expect((*x & (kMarked - 1)) != 0, 0)) {
    I16 begun[R][P];
    add_high<kDtype, R, P>(begun, w + kGroupScaleBytes, panel_bytes, x, high, lane_offset(kDtype) ? scale + R : nullptr);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) dots[r][p] = begun[r][p];
    }
    if constexpr (kFineMinima) {
      F16 apart[R][P];  // so that `sum` itself has no address
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) apart[r][p] = sum[r][p];
      }
      add_fine_minima<kDtype, R, P>(apart, tile, group, x);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sum[r][p] = apart[r][p];
      }
    }
  } else {
    begin_dots<R, P>(dots, lane_offset(kDtype) ? scale + R : nullptr);
  }
  add_codes<kDtype, R, P>(dots, w + kGroupScaleBytes, panel_bytes, codes);
  add_scaled<kDtype, R, P, 0>(sum, dots, w, panel_bytes, scale, nullptr);
}

template <int R, int P>
OCTAVO_INLINE void cross_codes(I16 (&dots)[R][P], const int32_t* x, const int32_t* table) {
  const int32_t* of_outputs = table + kScaleTableWords;
  begin_crossed<R, P>(dots, of_outputs, table_words(true), x + 1 + (kGroupUnits + 2) * R);
  add_crossed<R, P>(dots, of_outputs + kLanes, table_words(true), x + 1);
}

// A group of which a scale is not in the table, or without crossed products one with finely rounded rows. A call, as `add_high` is.
template <WeightsDtype kDtype, int R, int P, bool kCrossed>
__attribute__((noinline, cold)) static void add_group_apart(F16 (&sum)[R][P], const GroupedTile& tile, int group, const uint8_t* w,
                                                            const int32_t* x, const int32_t* high, const int32_t* table) {
  if constexpr (kDtype == WeightsDtype::int4_whole_min) add_fine_minima<kDtype, R, P>(sum, tile, group, x);
  if constexpr (kCrossed) {
    I16 dots[R][P], begun[R][P];
    cross_codes<R, P>(dots, x, table);
    if (*x & (kMarked - 1)) {
      add_high<kDtype, R, P>(begun, w + kGroupScaleBytes, tile.panel_bytes, x, high, nullptr);
      for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) dots[r][p] = add_int(dots[r][p], begun[r][p]);
    }
    add_scaled<kDtype, R, P, 0>(sum, dots, w, tile.panel_bytes, x + 1 + kGroupUnits * R, nullptr);
  } else {
    add_group<kDtype, R, P, false>(sum, tile, group, w, x, high);
  }
}

// Of crossed products: the share of the high bytes, and what whole minima bring (`add_fine_minima`), of the rows that are rounded
// finely. Not a call: that would write and read all sums, and one row after another needs few registers. Without crossed products
// gcc finds too few (seven percent slower).
template <WeightsDtype kDtype, int R, int P>
OCTAVO_INLINE void add_fine_rows(F16 (&sum)[R][P], I16 (&dots)[R][P], const GroupedTile& tile, int group, const uint8_t* w,
                                 const int32_t* x, const int32_t* high) {
  constexpr size_t kBytes = group_bytes(kDtype);
  const uint8_t* pairs = w - static_cast<size_t>(group % 2) * kBytes + kGroupScaleBytes / 2;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    if (!(*x >> r & 1)) continue;
    I16 part[2][P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) part[0][p] = part[1][p] = set1_int(0);
    add_row<kDtype, P>(part, w + kGroupScaleBytes, tile.panel_bytes, high + r * kGroupUnits);
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) dots[r][p] = add_int(dots[r][p], times_128(add_int(part[0][p], part[1][p])));
    if constexpr (kDtype == WeightsDtype::int4_whole_min) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) {
        const Codes both = load_minima(pairs + static_cast<size_t>(p) * tile.panel_bytes, kBytes);
        const F16 whole = to_float(group % 2 ? second_of_pairs(both) : first_of_pairs(both));
        const F16 minimum = mul(whole, load(tile.units + static_cast<size_t>(p) * tile.units_apart));
        sum[r][p] = fma(minimum, set1(as_float(x[1 + kGroupUnits * R + R + r])), sum[r][p]);
      }
    }
  }
}

template <WeightsDtype kDtype, int R, int P, bool kCrossed>
OCTAVO_INLINE void add_group_by_table(F16 (&sum)[R][P], const GroupedTile& tile, int group, const uint8_t* w, const int32_t* x,
                                      const int32_t* high, const int32_t* table) {
  const size_t panel_bytes = tile.panel_bytes;
  if (__builtin_expect(kCrossed ? *x >= kMarked : *x != 0, 0)) {
    F16 apart[R][P];  // so that `sum` itself has no address
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) apart[r][p] = sum[r][p];
    }
    add_group_apart<kDtype, R, P, kCrossed>(apart, tile, group, w, x, high, table);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sum[r][p] = apart[r][p];
    }
    return;
  }
  const int32_t *codes = x + 1, *scale = codes + kGroupUnits * R;
  I16 dots[R][P];
  if constexpr (kCrossed) {
    cross_codes<R, P>(dots, x, table);
    if (__builtin_expect(*x != 0, 0)) add_fine_rows<kDtype, R, P>(sum, dots, tile, group, w, x, high);
  } else {
    begin_dots<R, P>(dots, lane_offset(kDtype) ? scale + R : nullptr);
    add_codes<kDtype, R, P>(dots, w + kGroupScaleBytes, panel_bytes, codes);
  }
  add_scaled<kDtype, R, P, table_words(kCrossed)>(sum, dots, w, panel_bytes, scale, table);
}

// What whole minima bring, for all groups at once but those that `add_fine_minima` adds; factors: [groups / 2][R] pairs, [R] units.
template <WeightsDtype kDtype, int R, int P>
OCTAVO_INLINE void add_whole_minima(F16 (&sum)[R][P], const GroupedTile& tile, const int32_t* factors) {
  constexpr size_t kBytes = group_bytes(kDtype);
  const uint8_t* w = tile.weights + kGroupScaleBytes / 2;
  I16 dots[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) dots[r][p] = set1_int(0);
  }
  for (int group = 0; group < tile.groups; group += 2, w += 2 * kBytes, factors += R) {
    Codes minima[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) minima[p] = load_minima(w + static_cast<size_t>(p) * tile.panel_bytes, kBytes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) dots[r][p] = add_pairs(dots[r][p], minima[p], factors[r]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; p++) {
    const F16 units = load(tile.units + p * tile.units_apart);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) sum[r][p] = fma(to_float(dots[r][p]), mul(units, set1(as_float(factors[r]))), sum[r][p]);
  }
}

template <int R, int P>
OCTAVO_INLINE void end_tile(const GroupedTile& tile, const F16 (&sum)[R][P]) {
  float* out = tile.out;
  if (P == 2 && tile.end == TileEnd::gate) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++, out += tile.stride) store(out, silu_mul_lanes(sum[r][0], sum[r][P - 1]));
  } else if (tile.end == TileEnd::accumulate) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++, out += tile.stride) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) store(out + p * kLanes, add(load(out + p * kLanes), sum[r][p]));
    }
  } else {
    const size_t stride = tile.end == TileEnd::keep ? P * kLanes : tile.stride;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++, out += stride) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) store(out + p * kLanes, sum[r][p]);
    }
  }
}

// The table of so many groups is read well without being asked for: the first-level cache holds most of it.
constexpr int kNearGroups = 24;

template <WeightsDtype kDtype, int R, int P, TileReads kReads>
static void run_grouped_tile(const GroupedTile& tile) {
  constexpr size_t kBytes = group_bytes(kDtype);
  constexpr bool kCrossed = kReads == TileReads::crossed;
  constexpr size_t kTableWords = P * table_words(kCrossed);
  F16 sum[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) sum[r][p] = zero();
  }
  const uint8_t *w = tile.weights, *next = tile.prefetch;
  const int32_t *x = tile.x, *high = tile.x_high, *table = tile.table;
  const size_t panel_bytes = tile.panel_bytes, prefetch_step = tile.prefetch_step;
  for (int group = 0; group < tile.groups; group++) {
    if (kReads == TileReads::once) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++)
#pragma GCC unroll 9
        for (size_t line = 0; line < kBytes; line += 64) __builtin_prefetch(next + static_cast<size_t>(p) * panel_bytes + line, 0, 2);
    } else {
      for (size_t line = 0; line < prefetch_step; line += 64) __builtin_prefetch(next + line, 0, 2);
    }
    next += prefetch_step;
    if constexpr (kReads == TileReads::with_table || kCrossed) {
      if (kCrossed && tile.groups > kNearGroups) {
#pragma GCC unroll 32
        for (size_t word = 0; word < kTableWords; word += 2 * kLanes) __builtin_prefetch(table + kTableWords + word, 0, 3);
      }
      add_group_by_table<kDtype, R, P, kCrossed>(sum, tile, group, w, x, high, table);
      table += kTableWords;
    } else {
      add_group<kDtype, R, P>(sum, tile, group, w, x, high);
    }
    w += kBytes;
    x += x_group_words(R, kCrossed);
    high += x_high_words(R);
  }
  if constexpr (kDtype == WeightsDtype::int4_whole_min) add_whole_minima<kDtype, R, P>(sum, tile, x);
  end_tile<R, P>(tile, sum);
}

using GroupedTileFn = void (*)(const GroupedTile&);

template <WeightsDtype kDtype, int R, TileReads kReads>
static GroupedTileFn grouped_tile_of_rows(int panels) {
  if constexpr (max_grouped_panels(R) >= 4) {
    if (panels == 4) return run_grouped_tile<kDtype, R, 4, kReads>;
  }
  if constexpr (max_grouped_panels(R) >= 2) {
    if (panels == 2) return run_grouped_tile<kDtype, R, 2, kReads>;
  }
  return run_grouped_tile<kDtype, R, 1, kReads>;
}

// The tile of `rows` rows (kLeast to kMaxGroupedRows) and `panels` panels (1, 2 or 4, at most max_grouped_panels(rows)).
template <WeightsDtype kDtype, TileReads kReads, int kLeast, int R = kMaxGroupedRows>
static GroupedTileFn find_grouped_tile(int rows, int panels) {
  if constexpr (R > kLeast) {
    if (rows < R) return find_grouped_tile<kDtype, kReads, kLeast, R - 1>(rows, panels);
  }
  return grouped_tile_of_rows<kDtype, R, kReads>(panels);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
