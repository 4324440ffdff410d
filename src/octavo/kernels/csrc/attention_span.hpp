// One span of keys for a few query rows: maximum, sum and weighted values (m, l, O) from scratch; and how spans merge.
//
// Law 1 lives here. A row's result is made of chains of additions (over head_dim for a score, over the span's keys for
// an element of O) that do not depend on which rows or tiles are computed beside it. Keys that a row may not see get
// weight 0 by selection, and the V of slots that no row may see is replaced by 0 before it is multiplied; of V in codes that
// are multiplied as whole numbers, scales and middles are, since 0 times any code is 0.
#pragma once
#include <type_traits>

#include "attention_bf16_dot.hpp"
#include "attention_tiles.hpp"
#include "attention_widened.hpp"
#include "hadamard.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// What holds for all rows of a call.
struct SpanRule {
  int k_dim, v_dim;  // multiples of 16
  int window;        // keys that a row sees at most, its own included
  float cap;         // of scores, in the unit of the scores; 0: none

  int first_key(int position) const { return position >= window ? position - window + 1 : 0; }
};

// Rows of one KV head and one strip (16 positions at a multiple of 16): all of them end in the same tile.
struct RowBlock {
  int32_t num_rows;
  int32_t first_key;                  // of the first row
  int32_t position[kMaxRows];         // ascending
  int32_t out_row[kMaxRows];          // token * num_heads + head
  uint32_t* q;                        // packed queries, [num_rows][Tiles::kQueryWords]
  float* o;                           // [num_rows][v_dim]
  float m[kLanes], l[kLanes];         // lanes from num_rows on are there to be computed with, and mean nothing

  int last_position() const { return position[num_rows - 1]; }
  int first_span() const { return first_key / kSpanKeys; }
  bool sees(int span) const { return span >= first_span() && last_position() >= span * kSpanKeys; }
};

// The keys of a span that rows see: row r those from begin[r] to end[r], counted from the span's start.
struct SpanKeys {
  int first_tile, num_tiles;  // tiles [first_tile, num_tiles) are computed
  int low_end;                // before this tile, some row does not see all keys below its end
  int32_t begin[kMaxRows], end[kMaxRows];

  bool is_full() const { return low_end <= 0 && end[0] == kSpanKeys; }  // all rows see all keys
};

// Where a span's result goes: it is stored there, or merged into the result of the spans before.
struct SpanResult {
  float *o, *m, *l;  // [num_rows][v_dim], [16], [16]: lanes of m and l are rows
  bool merge;
};

// The new maximum of rows, and what old and new contribute to it.
OCTAVO_INLINE F16 share_rows(F16 old_m, F16 span_m, Shares& shares) {
  const F16 m = max(old_m, span_m);
  store(shares.old, weight_exp2(sub(old_m, m)));
  store(shares.span, weight_exp2(sub(span_m, m)));
  return m;
}

static inline void cap_scores(const SpanKeys& keys, float cap, float* scores) {
  const F16 limit = set1(cap), factor = set1(2.88539008f / cap);
  for (int tile = keys.first_tile; tile < keys.num_tiles; tile++)
    store(scores + tile * 16, cap_lanes(load(scores + tile * 16), limit, factor));
}

// Hides the keys that a row does not see, and finds the largest score.
template <int kWeighTiles>
OCTAVO_INLINE float mask_scores(const SpanKeys& keys, int row, float* scores) {
  const F16 nothing = set1(-__builtin_inff());
  for (int tile = keys.first_tile; tile < keys.low_end; tile++) {
    const int hidden = keys.begin[row] - tile * 16;
    if (hidden > 0) store(scores + tile * 16, first_lanes(nothing, load(scores + tile * 16), hidden < 16 ? hidden : 16));
  }
  float* last = scores + (keys.num_tiles - 1) * 16;
  const int seen = keys.end[row] - (keys.num_tiles - 1) * 16;
  if (seen < 16) store(last, first_lanes(load(last), nothing, seen));
  if (kWeighTiles > 1 && keys.first_tile % 2) store(scores + (keys.first_tile - 1) * 16, nothing);
  if (kWeighTiles > 1 && keys.num_tiles % 2) store(scores + keys.num_tiles * 16, nothing);
  F16 largest[4];
  for (F16& part : largest) part = set1(kLowestScore);
  int tile = keys.first_tile;
  for (; tile + 4 <= keys.num_tiles; tile += 4)
    for (int i = 0; i < 4; i++) largest[i] = max(load(scores + (tile + i) * 16), largest[i]);  // skips a NaN
  for (; tile < keys.num_tiles; tile++) largest[0] = max(load(scores + tile * 16), largest[0]);
  return max_lanes(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

template <class Tiles, int kRows, bool kPrefetch, bool kScaled>
static __attribute__((noinline)) void span_of_rows(const SpanTiles& tiles, const SpanKeys& keys, const SpanRule& rule,
                                                   const uint32_t* q, SpanBuffers& buffers, SpanResult result) {
  constexpr int kWide = Tiles::vectors_for(kRows), kWideV = Tiles::value_vectors_for(kRows);
  const float *k_scales = kScaled ? tiles.k_scales : nullptr, *v_scales = kScaled ? tiles.v_scales : nullptr;
  const uint8_t *const *k = tiles.k, *const *v = tiles.v, *const *next = tiles.next;
  const int first = keys.first_tile, num_tiles = keys.num_tiles;
  alignas(64) float m[kLanes] = {}, l[kLanes] = {};
  float wrong = 0.f;
  if constexpr (Tiles::kHasUnits) {
    wrong = Tiles::log_scales(first, num_tiles, v_scales, buffers.logs);
    buffers.middles = tiles.v_middles;
  }
  bool is_noted = false;
  if constexpr (Tiles::kNotesScores && kWide == 2) {
    is_noted = keys.is_full() && !(rule.cap > 0.f);
    if (is_noted) {
      for (int tile = 0; tile < kSpanTiles; tile += 2)
        Tiles::template scores<kRows, 2, kPrefetch>(k + tile, next + tile, q, rule.k_dim, k_scales, buffers.scores, tile * 16,
                                                    typename Tiles::NotedBounds{buffers});
      for (int row = 0; row < kRows; row++) m[row] = max_lanes(load(buffers.largest(row)));
    }
  }
  if (!is_noted) {
    int tile = first;
    for (; tile + kWide <= num_tiles; tile += kWide)
      Tiles::template scores<kRows, kWide, kPrefetch>(k + tile, next + tile - first, q, rule.k_dim, k_scales, buffers.scores, tile * 16);
    for (; tile < num_tiles; tile++)
      Tiles::template scores<kRows, 1, kPrefetch>(k + tile, next + tile - first, q, rule.k_dim, k_scales, buffers.scores, tile * 16);
    for (int row = 0; row < kRows; row++) {
      if (rule.cap > 0.f) cap_scores(keys, rule.cap, buffers.scores[row]);
      m[row] = mask_scores<Tiles::kWeighTiles>(keys, row, buffers.scores[row]);
    }
  }
  if constexpr (Tiles::kHasUnits)
    for (int row = 0; row < kRows; row++) Tiles::set_units(buffers, row, first, num_tiles, m[row], wrong, is_noted);
  Shares shares;
  store(result.m, result.merge ? share_rows(load(result.m), load(m), shares) : load(m));

  next += num_tiles - first;
  const Shares* merge = result.merge ? &shares : nullptr;
  const int num_vectors = rule.v_dim / 16;
  int column = num_vectors < kWideV ? 1 : kWideV;
#define OCTAVO_VALUES(width, weigh, at) \
  Tiles::template values<kRows, width, kPrefetch, weigh>(v, next, first, num_tiles, buffers, m, v_scales, rule.v_dim, at, result.o, merge)
  if (column == kWideV) OCTAVO_VALUES(kWideV, true, 0);
  else OCTAVO_VALUES(1, true, 0);
  for (; column + kWideV <= num_vectors; column += kWideV) OCTAVO_VALUES(kWideV, false, column);
  for (; column < num_vectors; column++) OCTAVO_VALUES(1, false, column);
#undef OCTAVO_VALUES
  for (int row = 0; row < kRows; row++) l[row] = sum_lanes(load(buffers.sums[row]));
  store(result.l, merge ? merged(load(result.l), load(shares.old), load(l), load(shares.span)) : load(l));
}

// Calls visit(std::integral_constant<int, num_rows>), for a number of rows that take_rows gives and `kLimit` allows.
template <int kLimit, class Visit>
OCTAVO_INLINE void with_rows(int num_rows, Visit&& visit) {
#define OCTAVO_ROWS(n) \
  case n:              \
    if constexpr (n <= kLimit) visit(std::integral_constant<int, n>{}); \
    break;
  switch (num_rows) {
    OCTAVO_ROWS(1)
    OCTAVO_ROWS(2)
    OCTAVO_ROWS(3)
    OCTAVO_ROWS(4)
    OCTAVO_ROWS(5)
    OCTAVO_ROWS(6)
    OCTAVO_ROWS(7)
    OCTAVO_ROWS(8)
    OCTAVO_ROWS(12)
    default: break;  // take_rows gives no other number
  }
#undef OCTAVO_ROWS
}

template <class Tiles, bool kPrefetch, bool kScaled>
static void span_of_any_rows(int num_rows, const SpanTiles& tiles, const SpanKeys& keys, const SpanRule& rule,
                             const uint32_t* q, SpanBuffers& buffers, SpanResult result) {
  with_rows<Tiles::kRowLimit>(num_rows, [&](auto rows) {
    span_of_rows<Tiles, decltype(rows)::value, kPrefetch, kScaled>(tiles, keys, rule, q, buffers, result);
  });
}

// How many of `left` rows to compute together.
static inline int take_rows(int left) {
  if (kMaxRows < 12) return left < kMaxRows ? left : kMaxRows;
  return left == 12 || left > 16 ? 12 : left < 8 ? left : 8;
}

// Blocks that `rows` rows of one strip need at most.
static inline int max_row_blocks(int rows) { return 3 * rows / (2 * kMaxRows) + 1; }

constexpr int kMaxCutTiles = 3;  // two where the window begins, one where rows end

struct ThreadBuffers {
  SpanBuffers span;
  alignas(64) float v_scales[kSpanKeys], v_middles[kSpanKeys];
  uint8_t* cut_tiles;  // [kMaxCutTiles], each v_dim * 64 bytes
};

static inline SpanKeys keys_of_rows(const RowBlock& block, int span, const SpanRule& rule) {
  const int base = span * kSpanKeys;
  SpanKeys keys;
  for (int row = 0; row < block.num_rows; row++) {
    const int begin = rule.first_key(block.position[row]) - base, end = block.position[row] + 1 - base;
    keys.begin[row] = begin < 0 ? 0 : begin < kSpanKeys ? begin : kSpanKeys;
    keys.end[row] = end < kSpanKeys ? end : kSpanKeys;
  }
  const int last = block.num_rows - 1;
  keys.first_tile = keys.begin[0] / kTileTokens;
  keys.num_tiles = (keys.end[last] + kTileTokens - 1) / kTileTokens;
  keys.low_end = (keys.begin[last] + kTileTokens - 1) / kTileTokens;
  return keys;
}

// Replaces the tiles at the edges of what rows [first, last] of a block see by copies in which other tokens are 0.
// True when a token that only some of these rows see holds a NaN or an infinity.
template <class Tiles>
static bool cut_edges(const SpanKeys& keys, int first, int last, int v_dim, const uint8_t* const* whole,
                      ThreadBuffers& buffers, SpanTiles& tiles) {
  bool poisoned = false;
  int num_cuts = 0;
  const bool cut_last = keys.end[first] < keys.num_tiles * kTileTokens;
  for (int tile = keys.first_tile; tile < keys.num_tiles; tile++) {
    if (tile >= keys.low_end && !(cut_last && tile == keys.num_tiles - 1)) continue;
    const int base = tile * kTileTokens;
    const TileCut cut = {keys.begin[first] - base, keys.end[last] - base, keys.begin[last] - base, keys.end[first] - base};
    if constexpr (Tiles::kCutsV) {
      uint8_t* to = buffers.cut_tiles + static_cast<size_t>(num_cuts++) * v_dim * 64;
      poisoned |= Tiles::cut_v(whole[tile], reinterpret_cast<uint32_t*>(to), v_dim, cut);
      tiles.v[tile] = to;
    }
    if (tiles.v_scales) poisoned |= cut_scales(buffers.v_scales + base, cut);
    if (tiles.v_middles) poisoned |= cut_scales(buffers.v_middles + base, cut);
  }
  return poisoned;
}

static inline void copy_numbers(const float* from, const SpanKeys& keys, float* to) {
  for (int tile = 0; tile < kSpanTiles; tile++)
    store(to + tile * 16, tile >= keys.first_tile && tile < keys.num_tiles ? load(from + tile * 16) : zero());
}

// Scales and middles of V, to be cut.
static inline void copy_scales(const SpanTiles& from, const SpanKeys& keys, ThreadBuffers& to) {
  if (from.v_scales) copy_numbers(from.v_scales, keys, to.v_scales);
  if (from.v_middles) copy_numbers(from.v_middles, keys, to.v_middles);
}

// The span's part of a block of rows that sees it. `tiles` holds the tiles from the first to the last that they see.
template <class Tiles, bool kPrefetch, bool kScaled>
static void attend_span(const RowBlock& block, int span, const SpanTiles& span_tiles, const SpanRule& rule,
                        ThreadBuffers& buffers, SpanResult result) {
  const SpanKeys keys = keys_of_rows(block, span, rule);
  const int last = block.num_rows - 1;
  const auto run = span_of_any_rows<Tiles, kPrefetch, kScaled>;
  const bool is_whole = keys.low_end <= keys.first_tile && keys.end[0] == keys.num_tiles * kTileTokens;
  const bool is_paired = keys.first_tile % 2 == 0 && keys.num_tiles % 2 == 0;  // no scales outside are multiplied
  if (is_whole && (is_paired || !span_tiles.v_scales))
    return run(block.num_rows, span_tiles, keys, rule, block.q, buffers.span, result);

  SpanTiles tiles = span_tiles;
  copy_scales(span_tiles, keys, buffers);
  if (tiles.v_scales) tiles.v_scales = buffers.v_scales;
  if (tiles.v_middles) tiles.v_middles = buffers.v_middles;
  if (!cut_edges<Tiles>(keys, 0, last, rule.v_dim, span_tiles.v, buffers, tiles))
    return run(block.num_rows, tiles, keys, rule, block.q, buffers.span, result);

  // a token that only some rows see holds a NaN or an infinity, and 0 times that is not 0: each row by itself
  for (int row = 0; row <= last; row++) {
    SpanKeys one = keys;
    one.begin[0] = keys.begin[row];
    one.end[0] = keys.end[row];
    copy_scales(span_tiles, keys, buffers);
    cut_edges<Tiles>(keys, row, row, rule.v_dim, span_tiles.v, buffers, tiles);
    float m[kLanes] = {result.m[row]}, l[kLanes] = {result.l[row]};
    const SpanResult part = {result.o + row * rule.v_dim, m, l, result.merge};
    run(1, tiles, one, rule, block.q + row * Tiles::kQueryWords, buffers.span, part);
    result.m[row] = m[0];
    result.l[row] = l[0];
  }
  for (int row = last + 1; !result.merge && row < kLanes; row++) result.m[row] = result.l[row] = 0.f;
}

// Merges a span that was stored apart, with the same operations.
static void merge_span(RowBlock& block, int v_dim, const SpanResult& span) {
  Shares shares;
  store(block.m, share_rows(load(block.m), load(span.m), shares));
  store(block.l, merged(load(block.l), load(shares.old), load(span.l), load(shares.span)));
  for (int row = 0; row < block.num_rows; row++) {
    const F16 old = set1(shares.old[row]), share = set1(shares.span[row]);
    float* o = block.o + row * v_dim;
    const float* from = span.o + row * v_dim;
    for (int d = 0; d < v_dim; d += 16) store(o + d, merged(load(o + d), old, load(from + d), share));
  }
}

// Divides by the sum of the weights and, where there is one, of the head's sink: a logit without a value.
// Adding 0 makes -0 into +0: which of them a sum of zeros is depends on the rows beside it.
static void finish_rows(const RowBlock& block, int v_dim, const float* sinks, int num_heads, const float* v_factors,
                        bool is_turned, float* out) {
  alignas(64) float factors[kLanes];
  F16 share = set1(1.f), sum = load(block.l);
  if (sinks) {
    alignas(64) float logits[kLanes] = {};
    for (int row = 0; row < block.num_rows; row++) logits[row] = sinks[block.out_row[row] % num_heads] * 1.44269504f;
    Shares shares;
    share_rows(load(block.m), load(logits), shares);
    share = load(shares.old);
    sum = fma(sum, share, load(shares.span));
  }
  store(factors, div(share, sum));
  if (is_turned) turn(block.o, v_dim, block.num_rows, block.o);
  for (int row = 0; row < block.num_rows; row++) {
    const F16 factor = set1(factors[row]);
    float* to = out + static_cast<size_t>(block.out_row[row]) * v_dim;
    const float* from = block.o + row * v_dim;
    for (int d = 0; d < v_dim; d += 16) {
      F16 value = mul(load(from + d), factor);
      if (v_factors) value = mul(value, load(v_factors + d));
      store(to + d, add(value, zero()));
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
