// Attention arithmetic on tiles of codes as they lie: each line is widened to bf16 in registers on its way into the sums,
// which are those of attention_bf16_dot.hpp. For the few rows of one token, where making whole tiles would cost more.
#pragma once
#include "attention_bf16_dot.hpp"
#include "kv_expand.hpp"

#if OCTAVO_HAS_DPBF16 && defined(__AVX512VBMI__)
#define OCTAVO_READS_CODES 1
#else
#define OCTAVO_READS_CODES 0
#endif

#if OCTAVO_READS_CODES
namespace octavo {
namespace OCTAVO_ISA {

template <int kMaxDim, KVFormat kFormat>
struct CodeDotTiles {
  using Pairs = Bf16DotTiles<kMaxDim>;
  static constexpr int kQueryWords = Pairs::kQueryWords, kWeighTiles = Pairs::kWeighTiles;
  static constexpr int kRowLimit = 8;  // of 12 rows, or of several blocks, tiles are made once for all
  // V is read in steps of two lines, which the processor does not take for a stream that goes on beyond the tile's end.
  static constexpr int vectors_for(int) { return 2; }
  static constexpr int value_vectors_for(int) { return 2; }
  static constexpr bool kCutsV = true, kHasUnits = false, kNotesScores = false;

  template <int kRows, int kTiles, bool kPrefetch>
  OCTAVO_INLINE void scores(const uint8_t* const* k, const uint8_t* const* next, const uint32_t* q, int head_dim,
                            const float* scales, float (*out)[kSpanKeys], int column) {
    const CodeLines<false> codes(code_table(kFormat));
    F16 sum[kRows][kTiles];
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTiles; t++) sum[r][t] = zero();
    const int lines = head_dim / 4;
    for (int base = 0; base < lines; base += 4) {
      const uint8_t* ask = line_to_ask(next, base * kTiles, lines);
#pragma GCC unroll 4
      for (int line = base; line < base + 4; line++) {
        __m512i key[kTiles][2];
        for (int t = 0; t < kTiles; t++) {
          codes.widen(k[t] + line * 64, key[t][0], key[t][1]);
          if (kPrefetch) prefetch_line(ask, (line - base) * kTiles + t);
        }
        for (int half = 0; half < 2; half++) {
          for (int r = 0; r < kRows; r++) {
            const __m512bh x = set1_pair(q[r * kQueryWords + 2 * line + half]);
            for (int t = 0; t < kTiles; t++) sum[r][t] = dot(sum[r][t], (__m512bh)key[t][half], x);
          }
        }
      }
    }
    store_scores<kRows, kTiles>(sum, scales, out, column);
  }

  template <int kRows, int kVectors, bool kPrefetch, bool kWeigh>
  OCTAVO_INLINE void values(const uint8_t* const* v, const uint8_t* const* next, int first_tile, int num_tiles,
                            SpanBuffers& buffers, const float* max_scores, const float* scales, int head_dim, int column,
                            float* out, const Shares* shares) {
    const CodeLines<false> codes(code_table(kFormat));
    F16 sum[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < kVectors; c++) sum[r][c] = zero();
    for (int tile = first_tile; tile < num_tiles; tile++) {
      if (kWeigh && (tile % 2 == 0 || tile == first_tile))
        Pairs::template weigh<kRows>(buffers, tile / 2 * 2, tile == first_tile, max_scores, scales);
      for (int quad = 0; quad < kTileTokens / 4; quad++) {
        const int line = quad * (head_dim / 16) + column;
        __m512i x[kVectors][2];
        for (int c = 0; c < kVectors; c++) {
          codes.widen(v[tile] + (line + c) * 64, x[c][0], x[c][1]);
          if (kPrefetch) prefetch_line(next[tile - first_tile], line + c);
        }
        for (int half = 0; half < 2; half++) {
          for (int r = 0; r < kRows; r++) {
            const __m512bh weight = set1_pair(buffers.weight_pairs[r][tile * 8 + quad * 2 + half]);
            for (int c = 0; c < kVectors; c++) sum[r][c] = dot(sum[r][c], weight, (__m512bh)x[c][half]);
          }
        }
      }
    }
    store_values<kRows, kVectors>(sum, out + column * 16, head_dim, shares);
  }

  // Rows of one token see the same keys, so none is poisoned for some of them only. Code 0 is 0 in every format.
  static bool cut_v(const uint8_t* source, uint32_t* target, int head_dim, const TileCut& cut) {
    for (int quad = 0; quad < kTileTokens / 4; quad++) {
      alignas(16) uint8_t keep[16];
      for (int i = 0; i < 16; i++) keep[i] = cut.keeps(quad * 4 + i / 8 * 2 + i % 2) ? 0xff : 0;
      const __m512i mask = _mm512_maskz_broadcast_i32x4(0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(keep)));
      for (int line = quad * (head_dim / 16); line < (quad + 1) * (head_dim / 16); line++)
        _mm512_storeu_si512(target + line * 16, _mm512_and_si512(_mm512_loadu_si512(source + line * 64), mask));
    }
    return false;
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
#endif
