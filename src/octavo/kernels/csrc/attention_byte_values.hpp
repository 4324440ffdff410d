// Values in whole numbers, on V tiles of codes of 8 or 4 bits as they lie: their meaning is in kernels/byte_attention.py.
// Weights times the scales of V are rounded to 8 bits, in a power of two for each 32 keys. Sums of products are exact, and
// become f32 once for 32 keys.
#pragma once
#include "attention_bytes.hpp"

#if OCTAVO_DOTS_BYTES
namespace octavo {
namespace OCTAVO_ISA {

// Codes of a V tile, as signed bytes: the vectors of 16 dimensions from `column` on, four tokens beside each other.
struct Values8 {
  static constexpr bool kHasMiddles = false;
  static constexpr int line_of(int head_dim, int quad, int column) { return quad * (head_dim / 16) + column; }

  template <int kVectors, bool kPrefetch>
  OCTAVO_INLINE void load_codes(const uint8_t* tile, const uint8_t* soon, const uint8_t* ask, int line, __m512i (&x)[kVectors]) {
    for (int c = 0; c < kVectors; c++) {
      x[c] = load_fours(tile + (line + c) * 64);
      if (kPrefetch) prefetch_line(ask, line + c);
      if (kPrefetch) prefetch_soon(soon, line + c);
    }
  }
};

// Of 4 bits (kv_formats/k8v4.py): less 8, since what code 8 stands for (the middle) is added apart. Two vectors to a line.
struct Values4 {
  static constexpr bool kHasMiddles = true;
  static constexpr int line_of(int head_dim, int quad, int column) { return quad * (head_dim / 32) + column / 2; }

  template <int kVectors, bool kPrefetch>
  OCTAVO_INLINE void load_codes(const uint8_t* tile, const uint8_t* soon, const uint8_t*, int line, __m512i (&x)[kVectors]) {
    // heads are multiples of 32: a vector alone is never computed
    const __m512i codes = _mm512_loadu_si512(tile + line * 64), low = _mm512_set1_epi8(15), middle = _mm512_set1_epi8(8);
    x[0] = _mm512_sub_epi8(_mm512_and_si512(codes, low), middle);
    if constexpr (kVectors == 2)
      x[1] = _mm512_sub_epi8(_mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, codes, 4), low), middle);
    if (kPrefetch) prefetch_soon(soon, line);
  }
};

template <class Codes>
struct ByteValues {
  static constexpr int kRowLimit = kMaxRows, kWeighTiles = 2, kValueItemBytes = 0;  // no V tile is prepared
  static constexpr bool kCutsV = false, kHasUnits = true;  // 0 times a code is 0, whatever the code
  static constexpr bool kNotesScores = true;
  static constexpr int value_vectors_for(int) { return 2; }
  static constexpr float kFarScore = 1024.f;

  // The logarithms of V's scales, a little too large. Returns what is added to units: NaN where a scale is not finite.
  OCTAVO_INLINE float log_scales(int first_tile, int num_tiles, const float* scales, float* logs) {
    __mmask16 wrong = 0;
    for (int tile = first_tile / 2 * 2; tile < (num_tiles + 1) / 2 * 2; tile++) {
      const F16 scale = load(scales + tile * 16), bits = whole_to_float(_mm512_castps_si512(scale.v));
      wrong |= _mm512_cmp_ps_mask(sub(scale, scale).v, zero().v, _CMP_NEQ_UQ);
      store(logs + tile * 16, fma(bits, set1(0x1p-23f), set1(0.1f - 127.f)));  // exponent and fraction; log2(1 + x) < x + 0.09
    }
    return wrong ? __builtin_nanf("") : 0.f;
  }

  // Of scores that all are seen, while others are still multiplied.
  struct NotedBounds {
    static constexpr bool kNotes = true;
    SpanBuffers& buffers;

    __attribute__((always_inline)) void operator()(int row, int column, F16 first, F16 second) const {
      const float* logs = buffers.logs + column;
      store(buffers.bounds(row, column / 16), max(add(first, load(logs)), add(second, load(logs + 16))));
      const F16 largest = column ? load(buffers.largest(row)) : set1(kLowestScore);
      store(buffers.largest(row), max(first, max(second, largest)));  // in this order: skips a NaN, as mask_scores does
    }
  };

  // Of a row and each two tiles: the power of two above all weights times scales, and 2^-8 of that, the unit. A key that the
  // row does not see has a score of -inf, and is in neither. Scores far from 0, whose last bits would be lost in sums, are
  // made differences from the largest first.
  OCTAVO_INLINE void set_units(SpanBuffers& buffers, int row, int first_tile, int num_tiles, float max_score, float wrong, bool is_noted) {
    F16 largest = set1(max_score);
    if (!(__builtin_fabsf(max_score) < kFarScore)) {
      is_noted = false;
      for (int tile = first_tile / 2 * 2; tile < (num_tiles + 1) / 2 * 2; tile++)
        store(buffers.scores[row] + tile * 16, sub(load(buffers.scores[row] + tile * 16), largest));
      largest = zero();
    }
    __m512 most[kSpanTiles / 2];
#pragma GCC unroll 8
    for (int tile = 0; tile < kSpanTiles; tile += 2) {
      if (is_noted) {
        most[tile / 2] = load(buffers.bounds(row, tile)).v;
        continue;
      }
      const float *scores = buffers.scores[row] + tile * 16, *logs = buffers.logs + tile * 16;
      const F16 bounds = max(add(load(scores), load(logs)), add(load(scores + 16), load(logs + 16)));
      most[tile / 2] = tile + 1 >= first_tile && tile < num_tiles ? bounds.v : _mm512_set1_ps(-__builtin_inff());
    }
    const F16 bound = sub({largest_of_8(most)}, largest), above = {_mm512_maskz_roundscale_ps(0xffff, bound.v, _MM_FROUND_TO_POS_INF)};
    const F16 shift = sub(max(above, set1(-110.f)), set1(8.f));
    store(buffers.begins[row], add(largest, shift));
    store(buffers.units[row], add(scale_by_power(set1(1.f), shift), set1(wrong)));
  }

  // Of a row and two tiles: weights 2^(score - max), in units, and their sum; times the scales of V as bytes.
  OCTAVO_INLINE void weigh_row(SpanBuffers& buffers, int row, int tile, bool is_first, const float* scales) {
    const float* scores = buffers.scores[row] + tile * 16;
    const F16 begin = set1_at(buffers.begins[row] + unit_at(tile)), unit = set1_at(buffers.units[row] + unit_at(tile));
    const float* terms = kExp2Terms;
    asm volatile("" : "+r"(terms));  // operands in memory: registers are for sums
    const F16 low = rounded_exp2(sub(load(scores), begin), terms), high = rounded_exp2(sub(load(scores + 16), begin), terms);
    const F16 sum = is_first ? zero() : load(buffers.sums[row]);
    if constexpr (Codes::kHasMiddles) {  // times the unit first: in units, weights may be 2^118
      const float* middles = buffers.middles + tile * 16;
      const F16 first = mul(low, unit), second = mul(high, unit);
      store(buffers.sums[row], add(sum, add(first, second)));
      const F16 middle_sum = is_first ? zero() : load(buffers.middle_sums[row]);
      store(buffers.middle_sums[row], fma(second, load(middles + 16), fma(first, load(middles), middle_sum)));
    } else {
      store(buffers.sums[row], fma(add(low, high), unit, sum));
    }
    const __m512i a = whole_from_float(mul(low, load(scales + tile * 16)));
    const __m512i b = whole_from_float(mul(high, load(scales + tile * 16 + 16)));
    alignas(64) static constexpr FirstBytes kOrder;
    const __m512i bytes = _mm512_permutex2var_epi8(a, _mm512_load_si512(kOrder.at), b);
    _mm256_store_si256(reinterpret_cast<__m256i*>(buffers.weight_pairs[row] + tile * 4), _mm512_castsi512_si256(bytes));
  }

  // As in attention_widened.hpp, 32 keys at a time; half of many rows after the other, as registers allow.
  template <int kRows, int kVectors, bool kPrefetch, bool kWeigh>
  OCTAVO_INLINE void values(const uint8_t* const* v, const uint8_t* const* next, int first_tile, int num_tiles,
                            SpanBuffers& buffers, const float*, const float* scales, int head_dim, int column,
                            float* out, const Shares* shares) {
    constexpr int kFirst = 4 * kRows <= kAccumulators ? kRows : (kRows + 1) / 2;
    values_of<0, kFirst, kVectors, kPrefetch, kWeigh>(v, next, first_tile, num_tiles, buffers, scales, head_dim, column, out, shares);
    if constexpr (kFirst < kRows)
      values_of<kFirst, kRows, kVectors, false, kWeigh>(v, next, first_tile, num_tiles, buffers, scales, head_dim, column, out, shares);
  }

 private:
  template <int kFirst, int kEnd>
  OCTAVO_INLINE void weigh(SpanBuffers& buffers, int tile, bool is_first, const float* scales) {
    for (int r = kFirst; r < kEnd; r++) weigh_row(buffers, r, tile, is_first, scales);
  }

  // Of rows from kFirst to kEnd. They are weighed one by one while values of the two tiles before are added up: in units
  // that products leave idle.
  template <int kFirst, int kEnd, int kVectors, bool kPrefetch, bool kWeigh>
  OCTAVO_INLINE void values_of(const uint8_t* const* v, const uint8_t* const* next, int first_tile, int num_tiles,
                               SpanBuffers& buffers, const float* scales, int head_dim, int column, float* out, const Shares* shares) {
    constexpr int kRows = kEnd - kFirst;
    static_assert(kRows <= kTileTokens / 2, "each row has a place in two tiles");
    F16 sum[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
      for (int c = 0; c < kVectors; c++) sum[r][c] = zero();
    const int first_pair = first_tile / 2 * 2;
    if (kWeigh) {
      weigh<kFirst, kEnd>(buffers, first_pair, true, scales);
      if (first_tile > first_pair && first_pair + 2 < num_tiles)  // an odd first tile has no time for all rows
        weigh<kFirst, kEnd>(buffers, first_pair + 2, false, scales);
    }
    for (int pair = first_pair; pair < num_tiles; pair += 2) {
      __m512i dots[kRows][kVectors];
      for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++) dots[r][c] = _mm512_setzero_si512();
      const auto add_quad = [&](int tile, int quad) __attribute__((always_inline)) {
        __m512i x[kVectors];
        Codes::template load_codes<kVectors, kPrefetch>(v[tile], v[tile + 1], next[tile - first_tile],
                                                        Codes::line_of(head_dim, quad, column), x);
        for (int r = 0; r < kRows; r++) {
          const __m512i weight = set1_word(buffers.weight_pairs[kFirst + r][tile * 4 + quad]);
          for (int c = 0; c < kVectors; c++) add_fours(dots[r][c], weight, x[c]);
        }
      };
      if (kWeigh && pair >= first_tile && pair + 2 < num_tiles) {
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++) {
          add_quad(pair + step / 4, step % 4);
          if (step < kRows) weigh_row(buffers, kFirst + step, pair + 2, false, scales);
        }
      } else {
        const int end = pair + 2 < num_tiles ? pair + 2 : num_tiles;
        for (int tile = pair < first_tile ? first_tile : pair; tile < end; tile++) {
#pragma GCC unroll 4
          for (int quad = 0; quad < 4; quad++) add_quad(tile, quad);
        }
      }
      for (int r = 0; r < kRows; r++) {
        const F16 unit = set1_at(buffers.units[kFirst + r] + unit_at(pair));
        for (int c = 0; c < kVectors; c++) sum[r][c] = fma(whole_to_float(dots[r][c]), unit, sum[r][c]);
      }
    }
    for (int r = 0; Codes::kHasMiddles && r < kRows; r++) {
      const F16 middles = set1(sum_lanes(load(buffers.middle_sums[kFirst + r])));
      for (int c = 0; c < kVectors; c++) sum[r][c] = add(sum[r][c], middles);
    }
    store_values<kRows, kVectors>(sum, out + column * 16, head_dim, shares, kFirst);
  }

  // bytes 0 of 32 words
  struct FirstBytes {
    alignas(64) uint8_t at[64];
    constexpr FirstBytes() : at() {
      for (int i = 0; i < 64; i++) at[i] = static_cast<uint8_t>(i % 32 * 4);
    }
  };

  // Where the largest of two tiles is in what largest_of_8 gives.
  static constexpr int unit_at(int tile) { return tile / 2 % 4 * 4 + tile / 8; }

  // The largest lane of each of 8 vectors: of the i-th in lane 4 * (i % 4) + i / 4.
  OCTAVO_INLINE __m512 largest_of_8(const __m512 (&x)[8]) {
    __m512 fours[2];
    for (int i = 0; i < 2; i++) {
      __m512 twos[2];
      for (int j = 0; j < 2; j++) {
        const __m512 a = x[4 * i + 2 * j], b = x[4 * i + 2 * j + 1];
        twos[j] = _mm512_maskz_max_ps(0xffff, shuffled<0x44>(a, b), shuffled<0xee>(a, b));
      }
      fours[i] = _mm512_maskz_max_ps(0xffff, shuffled<0x88>(twos[0], twos[1]), shuffled<0xdd>(twos[0], twos[1]));
    }
    const __m512 pairs = _mm512_maskz_max_ps(0xffff, _mm512_maskz_unpacklo_ps(0xffff, fours[0], fours[1]),
                                             _mm512_maskz_unpackhi_ps(0xffff, fours[0], fours[1]));
    return _mm512_maskz_max_ps(0xffff, pairs, _mm512_maskz_shuffle_ps(0xffff, pairs, pairs, 0x4e));
  }

  template <int kOrder>
  OCTAVO_INLINE __m512 shuffled(__m512 a, __m512 b) {
    return _mm512_maskz_shuffle_f32x4(0xffff, a, b, kOrder);
  }
};

// K and V of int8.
template <int kMaxDim, int kQueryBytes>
struct Int8Tiles : ByteScores<kMaxDim, kQueryBytes, false>, ByteValues<Values8> {};

// K of int8, V of 4 bits.
template <int kMaxDim>
struct K8V4Tiles : ByteScores<kMaxDim, 1, true>, ByteValues<Values4> {};

// K of 4 bits, made into bf16 tiles since its scales are of channels; V of 4 bits.
template <int kMaxDim>
struct Int4Tiles : ByteValues<Values4> {
  using Scores = Bf16DotTiles<kMaxDim>;
  static constexpr bool kNotesScores = false;
  static constexpr int kQueryWords = Scores::kQueryWords, kItemBytes = Scores::kItemBytes;
  static constexpr int vectors_for(int rows) { return Scores::vectors_for(rows); }

  static void pack_query(const float* x, F16 scale, int head_dim, uint32_t* q) { Scores::pack_query(x, scale, head_dim, q); }

  template <int kRows, int kTiles, bool kPrefetch>
  OCTAVO_INLINE void scores(const uint8_t* const* k, const uint8_t* const* next, const uint32_t* q, int head_dim,
                            const float* scales, float (*out)[kSpanKeys], int column) {
    Scores::template scores<kRows, kTiles, kPrefetch>(k, next, q, head_dim, scales, out, column);
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
#endif
