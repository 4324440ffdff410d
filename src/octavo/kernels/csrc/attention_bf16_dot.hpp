// Attention arithmetic on bf16 tiles where the machine multiplies bf16 pairs: query and weights are rounded to bf16,
// the sums are f32. K tile [head_dim / 2][16][2], V tile [8][head_dim][2].
#pragma once
#include "attention_tiles.hpp"

#if OCTAVO_HAS_DPBF16
namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE __m512bh load_pairs(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
OCTAVO_INLINE __m512i set1_word(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
OCTAVO_INLINE __m512bh set1_pair(uint32_t pair) { return (__m512bh)set1_word(pair); }
OCTAVO_INLINE F16 dot(F16 sum, __m512bh a, __m512bh b) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }

template <int kMaxDim>
struct Bf16DotTiles {
  static constexpr int kQueryWords = kMaxDim / 2;  // between two rows of packed queries: pairs of dimensions
  static constexpr int kRowLimit = kMaxRows;
  static constexpr int vectors_for(int rows) { return vectors_that_fit(rows); }
  static constexpr int value_vectors_for(int rows) { return vectors_for(rows); }
  static constexpr bool kCutsV = true, kHasUnits = false, kNotesScores = false;
  static constexpr int kItemBytes = 2, kValueItemBytes = 2;  // of a number in a K or V tile

  static void pack_query(const float* x, F16 scale, int head_dim, uint32_t* q) {
    for (int d = 0; d < head_dim; d += 16) {
      const __m256bh pairs = _mm512_cvtneps_pbh(mul(load(x + d), scale).v);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + d / 2), (__m256i)pairs);
    }
  }

  // As in attention_widened.hpp, two dimensions at a time.
  template <int kRows, int kTiles, bool kPrefetch>
  OCTAVO_INLINE void scores(const uint8_t* const* k, const uint8_t* const* next, const uint32_t* q, int head_dim,
                            const float* scales, float (*out)[kSpanKeys], int column) {
    F16 sum[kRows][kTiles];
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTiles; t++) sum[r][t] = zero();
    const int words = head_dim / 2;
    for (int base = 0; base < words; base += 4) {
      const uint8_t* ask = line_to_ask(next, base * kTiles, words);
#pragma GCC unroll 4
      for (int word = base; word < base + 4; word++) {
        __m512bh key[kTiles];
        for (int t = 0; t < kTiles; t++) {
          key[t] = load_pairs(k[t] + word * 64);
          if (kPrefetch) prefetch_line(ask, (word - base) * kTiles + t);
        }
        for (int r = 0; r < kRows; r++) {
          const __m512bh x = set1_pair(q[r * kQueryWords + word]);
          for (int t = 0; t < kTiles; t++) sum[r][t] = dot(sum[r][t], key[t], x);
        }
      }
    }
    store_scores<kRows, kTiles>(sum, scales, out, column);
  }

  static constexpr int kWeighTiles = 2;  // weighed together

  // Weights 2^(score - max) of a row as bf16 pairs, for two tiles, and their sums: as rounded, or with scales before those
  // are multiplied in.
  OCTAVO_INLINE void weigh_row(SpanBuffers& buffers, int row, int tile, bool is_first, float max_score, const float* scales) {
    const float* scores = buffers.scores[row] + tile * 16;
    const F16 largest = set1(max_score), sum = is_first ? zero() : load(buffers.sums[row]);
    const F16 low = rounded_exp2(sub(load(scores), largest));
    const F16 high = rounded_exp2(sub(load(scores + 16), largest));
    __m512i pairs;
    if (scales) {
      pairs = (__m512i)_mm512_cvtne2ps_pbh(mul(high, load(scales + tile * 16 + 16)).v, mul(low, load(scales + tile * 16)).v);
      store(buffers.sums[row], add(sum, add(low, high)));
    } else {  // the bits of dot(sum, pairs, ones), which adds the second first
      pairs = (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
      const __m512i first = _mm512_maskz_slli_epi32(0xffff, pairs, 16), second = _mm512_and_si512(pairs, set1_word(0xffff0000u));
      store(buffers.sums[row], add(add(sum, {_mm512_castsi512_ps(second)}), {_mm512_castsi512_ps(first)}));
    }
    _mm512_store_si512(buffers.weight_pairs[row] + tile * 8, pairs);
  }

  template <int kRows>
  OCTAVO_INLINE void weigh(SpanBuffers& buffers, int tile, bool is_first, const float* max_scores, const float* scales) {
    for (int r = 0; r < kRows; r++) weigh_row(buffers, r, tile, is_first, max_scores[r], scales);
  }

  // As in attention_widened.hpp, two keys at a time.
  template <int kRows, int kVectors, bool kPrefetch, bool kWeigh>
  OCTAVO_INLINE void values(const uint8_t* const* v, const uint8_t* const* next, int first_tile, int num_tiles,
                            SpanBuffers& buffers, const float* max_scores, const float* scales, int head_dim, int column,
                            float* out, const Shares* shares) {
    F16 sum[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < kVectors; c++) sum[r][c] = zero();
    // Many rows are weighed one by one while the values of the two tiles before are added up: in units that products leave idle.
    constexpr bool kOneByOne = kRows > 4;
    static_assert(kRows <= kTileTokens, "a pair of tiles has a place for each row");
    const int second_pair = first_tile / 2 * 2 + 2;
    if (kWeigh && kOneByOne) {
      weigh<kRows>(buffers, second_pair - 2, true, max_scores, scales);
      if (first_tile % 2 && second_pair < num_tiles)  // an odd first tile has no time for all rows
        weigh<kRows>(buffers, second_pair, false, max_scores, scales);
    }
    for (int tile = first_tile; tile < num_tiles; tile++) {
      const int pair = tile / 2 * 2;
      if (kWeigh && !kOneByOne && (tile == pair || tile == first_tile)) weigh<kRows>(buffers, pair, pair < second_pair, max_scores, scales);
      const bool weighs_next = kWeigh && kOneByOne && pair >= first_tile && pair + 2 < num_tiles;
      const uint8_t* value = v[tile] + column * 64;
      for (int word = 0; word < kTileTokens / 2; word++, value += head_dim * 4) {
        __m512bh x[kVectors];
        for (int c = 0; c < kVectors; c++) {
          x[c] = load_pairs(value + c * 64);
          if (kPrefetch) prefetch_line(next[tile - first_tile], word * (head_dim / 16) + column + c);
        }
        for (int r = 0; r < kRows; r++) {
          const __m512bh weight = set1_pair(buffers.weight_pairs[r][tile * 8 + word]);
          for (int c = 0; c < kVectors; c++) sum[r][c] = dot(sum[r][c], weight, x[c]);
        }
        const int row = tile % 2 * 8 + word;
        if (weighs_next && row < kRows) weigh_row(buffers, row, pair + 2, false, max_scores[row], scales);
      }
    }
    store_values<kRows, kVectors>(sum, out + column * 16, head_dim, shares);
  }

  static bool cut_v(const uint8_t* source, uint32_t* target, int head_dim, const TileCut& cut) {
    return cut_v_tile<2, 0x7f807f80u>(source, target, head_dim, cut);
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
#endif
