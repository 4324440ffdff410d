// Attention arithmetic on tiles of int8 codes as they lie, in whole numbers: its meaning is in kernels/byte_attention.py. A
// query is rounded to 8 bits with one scale; weights times the scales of V to 8 bits, in a power of two for each 32 keys.
// Sums of products are exact; they become f32 once for a score, and once for 32 keys of a value.
#pragma once
#include "attention_bf16_dot.hpp"

#if OCTAVO_HAS_DPBF16 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define OCTAVO_DOTS_INT8 1
#else
#define OCTAVO_DOTS_INT8 0
#endif

#if OCTAVO_DOTS_INT8
namespace octavo {
namespace OCTAVO_ISA {

// A line of fours (kv_formats/quads.py): the four codes of a token (K) or dimension (V) beside each other.
OCTAVO_INLINE __m512i load_fours(const uint8_t* p) {
  const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  return _mm512_maskz_shuffle_epi8(~__mmask64{0}, _mm512_loadu_si512(p), _mm512_maskz_broadcast_i32x4(0xffff, order));
}

// The largest of 16 numbers without a sign, in all four lanes: as bits, a NaN is more than any float that is not negative.
OCTAVO_INLINE __m128i max_bits(__m512i v) {
  const __m256i a = _mm256_max_epu32(_mm512_maskz_extracti32x8_epi32(0xff, v, 0), _mm512_maskz_extracti32x8_epi32(0xff, v, 1));
  const __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i c = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_max_epu32(c, _mm_shuffle_epi32(c, 0xb1));
}

// Into the first-level cache: in decode, a tile's few products are too short to wait for the second.
OCTAVO_INLINE void prefetch_soon(const uint8_t* tile, int line) { __builtin_prefetch(tile + line * 64, 0, 3); }

OCTAVO_INLINE F16 whole_to_float(__m512i v) { return {_mm512_maskz_cvtepi32_ps(0xffff, v)}; }
OCTAVO_INLINE __m512i whole_from_float(F16 x) { return _mm512_maskz_cvtps_epi32(0xffff, x.v); }

// sum += products of four bytes without and with a sign. Not the intrinsic: with that, compilers move many sums to and fro.
OCTAVO_INLINE void add_fours(__m512i& sum, __m512i without_sign, __m512i with_sign) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(without_sign), "v"(with_sign));
}

template <int kMaxDim>
struct Int8DotTiles {
  // A packed query: what its scores are to be multiplied by, what its sums begin with, its codes.
  static constexpr int kQueryFactor = 0, kQueryBegin = 1, kQueryCodes = 16, kQueryWords = kQueryCodes + kMaxDim / 4;
  static constexpr int kRowLimit = kMaxRows, kWeighTiles = 2;
  static constexpr int kItemBytes = 0;  // no tile is prepared
  static constexpr bool kCutsV = false, kHasUnits = true;  // 0 times a code is 0, whatever the code
  static constexpr int vectors_for(int) { return 2; }
  static constexpr int value_vectors_for(int) { return 2; }

  // A query with a NaN or an infinity has a NaN for its factor; one of numbers below 1e-30 is 0.
  static void pack_query(const float* x, F16 scale, int head_dim, uint32_t* q) {
    __m512i largest = _mm512_setzero_si512();
    for (int d = 0; d < head_dim; d += 16) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(mul(load(x + d), scale).v), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_maskz_max_epu32(0xffff, largest, bits);
    }
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(max_bits(largest)));
    const bool is_finite = most - most == 0.f, is_zero = most < 1e-30f;
    const F16 steps = set1(is_finite && !is_zero ? 127.f / most : 0.f);
    uint8_t* codes = reinterpret_cast<uint8_t*>(q + kQueryCodes);
    __m512i sum = _mm512_setzero_si512();
    for (int d = 0; d < head_dim; d += 16) {
      const __m512i whole = is_finite ? whole_from_float(mul(mul(load(x + d), scale), steps)) : _mm512_setzero_si512();
      sum = _mm512_add_epi32(sum, whole);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + d), _mm512_maskz_cvtepi32_epi8(0xffff, whole));
    }
    const float factor = is_finite ? is_zero ? 0.f : most / 127.f : __builtin_nanf("");
    std::memcpy(q + kQueryFactor, &factor, sizeof factor);
    q[kQueryBegin] = static_cast<uint32_t>(-128 * _mm512_reduce_add_epi32(sum));  // codes of K are read with 128 added
  }

  template <int kRows, int kTiles, bool kPrefetch>
  OCTAVO_INLINE void scores(const uint8_t* const* k, const uint8_t* const* next, const uint32_t* q, int head_dim,
                            const float* scales, float (*out)[kSpanKeys], int column) {
    __m512i sum[kRows][kTiles];
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTiles; t++) sum[r][t] = set1_word(q[r * kQueryWords + kQueryBegin]);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const int lines = head_dim / 4;
    for (int base = 0; base < lines; base += 4) {
      const uint8_t* ask = line_to_ask(next, base * kTiles, lines);
#pragma GCC unroll 4
      for (int line = base; line < base + 4; line++) {
        __m512i key[kTiles];
        for (int t = 0; t < kTiles; t++) {
          key[t] = _mm512_xor_si512(load_fours(k[t] + line * 64), sign);
          if (kPrefetch) prefetch_line(ask, (line - base) * kTiles + t);
          if (kPrefetch) prefetch_soon(k[t + kTiles], line);
        }
        for (int r = 0; r < kRows; r++) {
          const __m512i x = set1_word(q[r * kQueryWords + kQueryCodes + line]);
          for (int t = 0; t < kTiles; t++) add_fours(sum[r][t], key[t], x);
        }
      }
    }
    for (int r = 0; r < kRows; r++) {
      float factor;
      std::memcpy(&factor, q + r * kQueryWords + kQueryFactor, sizeof factor);
      for (int t = 0; t < kTiles; t++)
        store(&out[r][column + t * 16], mul(whole_to_float(sum[r][t]), mul(load(scales + column + t * 16), set1(factor))));
    }
  }

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

  // Of a row and each two tiles: the power of two above all weights times scales, and what makes weights of scores.
  OCTAVO_INLINE void set_units(SpanBuffers& buffers, int row, int first_tile, int num_tiles, float max_score, float wrong) {
    __m512 most[kSpanTiles / 2];
#pragma GCC unroll 8
    for (int tile = 0; tile < kSpanTiles; tile += 2) {
      const float *scores = buffers.scores[row] + tile * 16, *logs = buffers.logs + tile * 16;
      const F16 bounds = max(add(load(scores), load(logs)), add(load(scores + 16), load(logs + 16)));
      most[tile / 2] = tile + 1 >= first_tile && tile < num_tiles ? bounds.v : _mm512_set1_ps(-__builtin_inff());
    }
    const F16 largest = set1(max_score), bound = sub({largest_of_8(most)}, largest);
    const F16 exponent = max({_mm512_maskz_roundscale_ps(0xffff, bound.v, _MM_FROUND_TO_POS_INF)}, set1(-110.f));
    const F16 shift = sub(exponent, set1(8.f));
    store(buffers.begins[row], add(largest, shift));
    store(buffers.units[row], add(scale_by_power(set1(1.f), shift), set1(wrong)));
  }

  // Of a row and two tiles: weights 2^(score - max), in units, and their sum; times the scales of V as bytes.
  OCTAVO_INLINE void weigh_row(SpanBuffers& buffers, int row, int tile, bool is_first, const float* scales) {
    const float* scores = buffers.scores[row] + tile * 16;
    const F16 begin = set1(buffers.begins[row][unit_at(tile)]), unit = set1(buffers.units[row][unit_at(tile)]);
    const float* terms = kExp2Terms;
    asm volatile("" : "+r"(terms));  // operands in memory: registers are for sums
    const F16 low = rounded_exp2(sub(load(scores), begin), terms), high = rounded_exp2(sub(load(scores + 16), begin), terms);
    store(buffers.sums[row], fma(add(low, high), unit, is_first ? zero() : load(buffers.sums[row])));
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
        const int line = quad * (head_dim / 16) + column;
        __m512i x[kVectors];
        for (int c = 0; c < kVectors; c++) {
          x[c] = load_fours(v[tile] + (line + c) * 64);
          if (kPrefetch) prefetch_line(next[tile - first_tile], line + c);
          if (kPrefetch) prefetch_soon(v[tile + 1], line + c);
        }
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
        const F16 unit = set1(buffers.units[kFirst + r][unit_at(pair)]);
        for (int c = 0; c < kVectors; c++) sum[r][c] = fma(whole_to_float(dots[r][c]), unit, sum[r][c]);
      }
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

}  // namespace OCTAVO_ISA
}  // namespace octavo
#endif
