// What the arithmetic of every KV format shares: the buffers of a span, and the V tile that is cut at a position.
#pragma once
#include "attention_simd.hpp"
#include "kv_tile.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// A span: 256 keys at a multiple of 256. It is summed from scratch, and spans are merged in ascending order: the one
// order of additions that a row knows, whoever computes which span.
constexpr int kMaxHeadDim = 256, kMaxLatentDim = 640;
constexpr int kSpanTiles = 16, kSpanKeys = kSpanTiles * kTileTokens;

constexpr float kLowestScore = -3.402823466e38f;

struct SpanBuffers {
  alignas(64) float scores[kMaxRows][kSpanKeys];               // become the weights where those are f32
  alignas(64) uint32_t weight_pairs[kMaxRows][kSpanKeys / 2];  // weights as bf16, two keys to a word, or as bytes, four keys
  alignas(64) float sums[kMaxRows][16];                        // of the weights, lane by lane
  // Where weights become whole numbers (attention_byte_values.hpp), for two tiles each: their unit, and the score of one unit.
  alignas(64) float units[kMaxRows][16], begins[kMaxRows][16], logs[kSpanKeys], middle_sums[kMaxRows][16];
  const float* middles;  // [kSpanKeys]

  // Until weights are found, their places hold what is known of scores: of each two tiles the bounds of weights times scales, as powers
  // of two, and of all tiles the largest scores; lane by lane.
  float* bounds(int row, int tile) { return reinterpret_cast<float*>(weight_pairs[row]) + tile / 2 * 16; }
  float* largest(int row) { return sums[row]; }
};

// What becomes of scores beyond being stored: nothing.
struct NothingNoted {
  static constexpr bool kNotes = false;
};

// The tiles of a span, and what of the next one to ask the memory for meanwhile: half tiles in the order of addresses.
// Tiles of formats with a scale for each token come with those: codes times scale is the value. Behind the last tiles there
// is room for what is read after them (attention_bytes.hpp).
struct SpanTiles {
  const uint8_t *k[kSpanTiles + 2], *v[kSpanTiles + 1], *next[2 * kSpanTiles];
  const float *k_scales, *v_scales, *v_middles;  // [kSpanKeys] or null; middles: what is added for each token
};

// What the spans before (old) and a new span contribute to a row: 2^(their maximum - the new maximum).
struct Shares {
  alignas(64) float old[kLanes], span[kLanes];
};

// One step of a merge, wherever it is done.
OCTAVO_INLINE F16 merged(F16 old, F16 old_share, F16 span, F16 span_share) {
  return fma(span, span_share, mul(old, old_share));
}

// Half tiles are asked for one after the other, as memory likes it: where the `asked`-th of their lines is, of up to four.
OCTAVO_INLINE const uint8_t* line_to_ask(const uint8_t* const* next, int asked, int lines) {
  const int tile = (asked >= lines) + (asked >= 2 * lines) + (asked >= 3 * lines);  // a division takes longer than a line's products
  return next[tile] + (asked - tile * lines) * 64;
}

// Stores sums of rows [kRows][kVectors] from first_row on, or merges them into what is there.
template <int kRows, int kVectors>
OCTAVO_INLINE void store_values(const F16 (&sum)[kRows][kVectors], float* out, int head_dim, const Shares* shares, int first_row = 0) {
  out += first_row * head_dim;
  if (!shares) {
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < kVectors; c++) store(out + r * head_dim + c * 16, sum[r][c]);
  } else {
    for (int r = 0; r < kRows; r++) {
      float* to = out + r * head_dim;
      for (int c = 0; c < kVectors; c++)
        store(to + c * 16, merged(load(to + c * 16), set1(shares->old[first_row + r]), sum[r][c], set1(shares->span[first_row + r])));
    }
  }
}

// Tokens of a tile: those in [first, end) are kept; of them, all rows see those in [first_common, end_common).
struct TileCut {
  int first, end, first_common, end_common;
  bool keeps(int token) const { return token >= first && token < end; }
  bool checks(int token) const { return keeps(token) && !(token >= first_common && token < end_common); }
};

// Stores scores of rows [kRows][kTiles], times the scales of their keys where there are some.
template <int kRows, int kTiles>
OCTAVO_INLINE void store_scores(const F16 (&sum)[kRows][kTiles], const float* scales, float (*out)[kSpanKeys], int column) {
  if (scales) {
    for (int t = 0; t < kTiles; t++) {
      const F16 scale = load(scales + column + t * 16);
      for (int r = 0; r < kRows; r++) store(&out[r][column + t * 16], mul(sum[r][t], scale));
    }
  } else {
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTiles; t++) store(&out[r][column + t * 16], sum[r][t]);
  }
}

// Copies a V tile ([16 / kPerWord][words] 32-bit words); tokens that are not kept become 0.
// True when a token that only some rows see holds a NaN or an infinity.
template <int kPerWord, uint32_t kExponent>
static bool cut_v_tile(const uint8_t* source, uint32_t* target, int words, const TileCut& cut) {
  static_assert(kPerWord <= 2, "32 or 16 bits a number");
  constexpr uint32_t sign = kPerWord == 2 ? 0x80008000u : 0x80000000u;
  constexpr uint32_t lowest = sign - kExponent;  // added to an exponent of all ones: carries into the sign
  typedef uint32_t Words __attribute__((vector_size(64)));
  Words found = {};
  for (int row = 0; row < kTileTokens / kPerWord; row++) {
    uint32_t keep = 0, check = 0;
    for (int part = 0; part < kPerWord; part++) {
      const uint32_t mask = kPerWord == 1 ? 0xffffffffu : 0xffffu << (16 * part);
      if (cut.keeps(row * kPerWord + part)) keep |= mask;
      if (cut.checks(row * kPerWord + part)) check |= mask & kExponent;
    }
    const uint8_t* from = source + static_cast<size_t>(row) * words * 4;
    uint32_t* to = target + static_cast<size_t>(row) * words;
    for (int i = 0; i < words; i += 16) {
      Words word;
      std::memcpy(&word, from + i * 4, sizeof word);
      found |= ((word & check) + lowest) & sign;
      word &= keep;
      std::memcpy(to + i, &word, sizeof word);
    }
  }
  uint32_t any = 0;
  for (int i = 0; i < 16; i++) any |= found[i];
  return any != 0;
}

// The same for the scales of a tile's tokens, in place.
static bool cut_scales(float* scales, const TileCut& cut) {
  bool found = false;
  for (int token = 0; token < kTileTokens; token++) {
    found |= cut.checks(token) && !(scales[token] - scales[token] == 0.f);
    if (!cut.keeps(token)) scales[token] = 0.f;
  }
  return found;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
