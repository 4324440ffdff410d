// One span of keys for a few query rows: maximum, sum and weighted values (m, l, O) from scratch; and how spans merge.
//
// Law 1 lives here. A row's result is made of chains of additions (over head_dim for a score, over the span's keys for
// an element of O) that do not depend on which rows or tiles are computed beside it. Keys that a row may not see get
// weight 0 by selection, and the V of slots that no row may see is replaced by 0 before it is multiplied.
#pragma once
#include "attention_bf16_dot.hpp"
#include "attention_tiles.hpp"
#include "attention_widened.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kLowestScore = -3.402823466e38f;

// Rows of one KV head and one strip (16 positions at a multiple of 16): all of them end in the same tile.
struct RowBlock {
  int32_t num_rows;
  int32_t position[kMaxRows];   // ascending
  int32_t out_row[kMaxRows];    // token * num_heads + head
  uint32_t* q;                  // packed queries, [num_rows][Tiles::kQueryWords]
  float* o;                     // [num_rows][head_dim]
  float m[kLanes], l[kLanes];   // lanes from num_rows on are there to be computed with, and mean nothing

  int last_position() const { return position[num_rows - 1]; }
};

// Where a span's result goes: it is stored there, or merged into the result of the spans before.
struct SpanResult {
  float *o, *m, *l;  // [num_rows][head_dim], [16], [16]: lanes of m and l are rows
  bool merge;
};

// The new maximum of rows, and what old and new contribute to it.
OCTAVO_INLINE F16 share_rows(F16 old_m, F16 span_m, Shares& shares) {
  const F16 m = max(old_m, span_m);
  store(shares.old, weight_exp2<false>(sub(old_m, m)));
  store(shares.span, weight_exp2<false>(sub(span_m, m)));
  return m;
}

template <class Tiles, int kRows, bool kPrefetch>
static __attribute__((noinline)) void span_of_rows(const SpanTiles& tiles, int num_tiles, const int32_t* valid_keys,
                                                   const uint32_t* q, int head_dim, SpanBuffers& buffers,
                                                   SpanResult result) {
  constexpr int kWide = vectors_for(kRows);
  const uint8_t *const *k = tiles.k, *const *v = tiles.v, *const *next = tiles.next;
  int tile = 0;
  for (; tile + kWide <= num_tiles; tile += kWide)
    Tiles::template scores<kRows, kWide, kPrefetch>(k + tile, next + tile, q, head_dim, buffers.scores, tile * 16);
  for (; tile < num_tiles; tile++)
    Tiles::template scores<kRows, 1, kPrefetch>(k + tile, next + tile, q, head_dim, buffers.scores, tile * 16);

  alignas(64) float m[kLanes] = {}, l[kLanes] = {};
  const F16 nothing = set1(-__builtin_inff());
  for (int row = 0; row < kRows; row++) {
    float* scores = buffers.scores[row];
    float* last = scores + (num_tiles - 1) * 16;
    if (valid_keys[row] < 16) store(last, first_lanes(load(last), nothing, valid_keys[row]));
    for (int i = num_tiles; i % Tiles::kWeighTiles; i++) store(scores + i * 16, nothing);
    F16 largest = set1(kLowestScore);
    for (int i = 0; i < num_tiles; i++) largest = max(load(scores + i * 16), largest);  // in this order: skips a NaN
    m[row] = max_lanes(largest);
  }
  Shares shares;
  store(result.m, result.merge ? share_rows(load(result.m), load(m), shares) : load(m));

  next += num_tiles;
  const Shares* merge = result.merge ? &shares : nullptr;
  const int num_vectors = head_dim / 16;
  float* o = result.o;
  int column = num_vectors < kWide ? 1 : kWide;
  if (column == kWide)
    Tiles::template values<kRows, kWide, kPrefetch, true>(v, next, num_tiles, buffers, m, head_dim, 0, o, merge);
  else
    Tiles::template values<kRows, 1, kPrefetch, true>(v, next, num_tiles, buffers, m, head_dim, 0, o, merge);
  for (; column + kWide <= num_vectors; column += kWide)
    Tiles::template values<kRows, kWide, kPrefetch, false>(v, next, num_tiles, buffers, m, head_dim, column, o, merge);
  for (; column < num_vectors; column++)
    Tiles::template values<kRows, 1, kPrefetch, false>(v, next, num_tiles, buffers, m, head_dim, column, o, merge);
  for (int row = 0; row < kRows; row++) l[row] = sum_lanes(load(buffers.sums[row]));
  store(result.l, merge ? merged(load(result.l), load(shares.old), load(l), load(shares.span)) : load(l));
}

template <class Tiles, bool kPrefetch>
static void span_of_any_rows(int num_rows, const SpanTiles& tiles, int num_tiles, const int32_t* valid_keys,
                             const uint32_t* q, int head_dim, SpanBuffers& buffers, SpanResult result) {
#define OCTAVO_ROWS(n)                                                                                            \
  case n:                                                                                                         \
    if constexpr (n <= kMaxRows)                                                                                  \
      span_of_rows<Tiles, n, kPrefetch>(tiles, num_tiles, valid_keys, q, head_dim, buffers, result);              \
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

// How many of `left` rows to compute together.
static inline int take_rows(int left) {
  if (kMaxRows < 12) return left < kMaxRows ? left : kMaxRows;
  return left == 12 || left > 16 ? 12 : left < 8 ? left : 8;
}

// Blocks that `rows` rows of one strip need at most.
static inline int max_row_blocks(int rows) { return 3 * rows / (2 * kMaxRows) + 1; }

struct ThreadBuffers {
  SpanBuffers span;
  uint32_t* v_tile;     // [head_dim * 16], a cut V tile
};

// The span's part of a block of rows. `tiles` holds the tiles up to the block's last position or the span's end.
template <class Tiles>
static void attend_span(const RowBlock& block, int span, SpanTiles& tiles, bool prefetch, int head_dim,
                        ThreadBuffers& buffers, SpanResult result) {
  const int last_tile = block.last_position() / kTileTokens - span * kSpanTiles;
  const int num_tiles = last_tile < kSpanTiles ? last_tile + 1 : kSpanTiles, num_rows = block.num_rows;
  int32_t valid_keys[kMaxRows];  // of the last tile
  for (int row = 0; row < num_rows; row++)
    valid_keys[row] = last_tile < kSpanTiles ? block.position[row] % kTileTokens + 1 : kTileTokens;
  const auto run = prefetch ? span_of_any_rows<Tiles, true> : span_of_any_rows<Tiles, false>;
  if (valid_keys[0] == kTileTokens)
    return run(num_rows, tiles, num_tiles, valid_keys, block.q, head_dim, buffers.span, result);

  const uint8_t* whole = tiles.v[num_tiles - 1];
  const bool poisoned = Tiles::cut_v(whole, buffers.v_tile, head_dim, valid_keys[0], valid_keys[num_rows - 1]);
  tiles.v[num_tiles - 1] = reinterpret_cast<const uint8_t*>(buffers.v_tile);
  if (!poisoned) {
    run(num_rows, tiles, num_tiles, valid_keys, block.q, head_dim, buffers.span, result);
  } else {  // a later token of the strip holds a NaN or an infinity, and 0 times that is not 0: each row by itself
    for (int row = 0; row < num_rows; row++) {
      float m[kLanes] = {result.m[row]}, l[kLanes] = {result.l[row]};
      Tiles::cut_v(whole, buffers.v_tile, head_dim, 0, valid_keys[row]);
      const SpanResult one = {result.o + row * head_dim, m, l, result.merge};
      run(1, tiles, num_tiles, valid_keys + row, block.q + row * Tiles::kQueryWords, head_dim, buffers.span, one);
      result.m[row] = m[0];
      result.l[row] = l[0];
    }
    for (int row = num_rows; !result.merge && row < kLanes; row++) result.m[row] = result.l[row] = 0.f;
  }
  tiles.v[num_tiles - 1] = whole;
}

// Merges a span that was stored apart, with the same operations.
static void merge_span(RowBlock& block, int head_dim, const SpanResult& span) {
  Shares shares;
  store(block.m, share_rows(load(block.m), load(span.m), shares));
  store(block.l, merged(load(block.l), load(shares.old), load(span.l), load(shares.span)));
  for (int row = 0; row < block.num_rows; row++) {
    const F16 old = set1(shares.old[row]), share = set1(shares.span[row]);
    float* o = block.o + row * head_dim;
    const float* from = span.o + row * head_dim;
    for (int d = 0; d < head_dim; d += 16) store(o + d, merged(load(o + d), old, load(from + d), share));
  }
}

// Divides by the sum. Adding 0 makes -0 into +0: which of them a sum of zeros is depends on the rows beside it.
static void finish_rows(const RowBlock& block, int head_dim, float* out) {
  float factors[kLanes];
  store(factors, div(set1(1.f), load(block.l)));
  for (int row = 0; row < block.num_rows; row++) {
    const F16 factor = set1(factors[row]);
    float* to = out + static_cast<size_t>(block.out_row[row]) * head_dim;
    for (int d = 0; d < head_dim; d += 16) store(to + d, add(mul(load(block.o + row * head_dim + d), factor), zero()));
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
