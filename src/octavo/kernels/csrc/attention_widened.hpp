// Attention arithmetic in f32 on tiles of any format that widens to f32 word by word.
#pragma once
#include "attention_tiles.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// How 16 32-bit words of a tile widen: kPerWord values lie in each, part 0 in the lowest bits.
struct F32Words {
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kExponent = 0x7f800000u;  // bits that are all set in a NaN or an infinity
  OCTAVO_INLINE F16 part(const uint8_t* words, int) { return load(reinterpret_cast<const float*>(words)); }
};
struct Bf16Words {
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kExponent = 0x7f807f80u;
  OCTAVO_INLINE F16 part(const uint8_t* words, int part) { return part == 0 ? low_bf16(words) : high_bf16(words); }
};
struct F16Words {
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kExponent = 0x7c007c00u;
  OCTAVO_INLINE F16 part(const uint8_t* words, int part) { return part_f16(words, part); }
};

// K tile [head_dim / kPerWord][16] words, V tile [16 / kPerWord][head_dim] words.
template <class Words, int kMaxDim>
struct WidenedTiles {
  static constexpr int kPerWord = Words::kPerWord;

  static constexpr int kQueryWords = kMaxDim;  // between two rows of packed queries: f32
  static constexpr int kRowLimit = kMaxRows;
  static constexpr int vectors_for(int rows) { return vectors_that_fit(rows); }
  static constexpr int value_vectors_for(int rows) { return vectors_for(rows); }
  static constexpr bool kCutsV = true, kHasUnits = false, kNotesScores = false;
  static constexpr int kItemBytes = 4 / kPerWord, kValueItemBytes = kItemBytes;  // of a number in a K or V tile

  static void pack_query(const float* x, F16 scale, int head_dim, uint32_t* q) {
    for (int d = 0; d < head_dim; d += 16) store(reinterpret_cast<float*>(q) + d, mul(load(x + d), scale));
  }

  // Scores of kRows rows x kTiles tiles; each is one chain of additions over head_dim.
  template <int kRows, int kTiles, bool kPrefetch>
  OCTAVO_INLINE void scores(const uint8_t* const* k, const uint8_t* const* next, const uint32_t* query, int head_dim,
                            const float* scales, float (*out)[kSpanKeys], int column) {
    const float* q = reinterpret_cast<const float*>(query);
    F16 sum[kRows][kTiles];
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTiles; t++) sum[r][t] = zero();
    for (int word = 0; word < head_dim / kPerWord; word++) {
      for (int part = 0; part < kPerWord; part++) {
        F16 key[kTiles];
        for (int t = 0; t < kTiles; t++) {
          key[t] = Words::part(k[t] + word * 64, part);
          if (kPrefetch && part == 0) prefetch_line(next[t], word);
        }
        for (int r = 0; r < kRows; r++) {
          const F16 x = set1(q[r * kQueryWords + word * kPerWord + part]);
          for (int t = 0; t < kTiles; t++) sum[r][t] = fma(key[t], x, sum[r][t]);
        }
      }
    }
    store_scores<kRows, kTiles>(sum, scales, out, column);
  }

  static constexpr int kWeighTiles = 1;  // weighed together

  // Scores of all rows become weights 2^(score - max), for one tile, and are summed; then scales are multiplied in.
  template <int kRows>
  OCTAVO_INLINE void weigh(SpanBuffers& buffers, int tile, bool is_first, const float* max_scores, const float* scales) {
    for (int r = 0; r < kRows; r++) {
      float* scores = buffers.scores[r] + tile * 16;
      const F16 weights = weight_exp2(sub(load(scores), set1(max_scores[r])));
      store(scores, scales ? mul(weights, load(scales + tile * 16)) : weights);
      store(buffers.sums[r], add(is_first ? zero() : load(buffers.sums[r]), weights));
    }
  }

  // out [kRows][head_dim], from `column` vectors on: weights x V over all keys, ascending, one chain for each element.
  // With kWeigh the weights are made on the way: in between, they take units that multiply-adds leave idle.
  // With shares, the result is merged into out.
  template <int kRows, int kVectors, bool kPrefetch, bool kWeigh>
  OCTAVO_INLINE void values(const uint8_t* const* v, const uint8_t* const* next, int first_tile, int num_tiles,
                            SpanBuffers& buffers, const float* max_scores, const float* scales, int head_dim, int column,
                            float* out, const Shares* shares) {
    F16 sum[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < kVectors; c++) sum[r][c] = zero();
    for (int tile = first_tile; tile < num_tiles; tile++) {
      if (kWeigh) weigh<kRows>(buffers, tile, tile == first_tile, max_scores, scales);
      const uint8_t* value = v[tile] + column * 64;
      for (int word = 0; word < kTileTokens / kPerWord; word++, value += head_dim * 4) {
        for (int part = 0; part < kPerWord; part++) {
          F16 x[kVectors];
          for (int c = 0; c < kVectors; c++) {
            x[c] = Words::part(value + c * 64, part);
            if (kPrefetch && part == 0) prefetch_line(next[tile - first_tile], word * (head_dim / 16) + column + c);
          }
          for (int r = 0; r < kRows; r++) {
            const F16 weight = set1(buffers.scores[r][tile * 16 + word * kPerWord + part]);
            for (int c = 0; c < kVectors; c++) sum[r][c] = fma(weight, x[c], sum[r][c]);
          }
        }
      }
    }
    store_values<kRows, kVectors>(sum, out + column * 16, head_dim, shares);
  }

  static bool cut_v(const uint8_t* source, uint32_t* target, int head_dim, const TileCut& cut) {
    return cut_v_tile<kPerWord, Words::kExponent>(source, target, head_dim, cut);
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
