// Scores in whole numbers, on K tiles of int8 codes as they lie: their meaning is in kernels/byte_attention.py. A query is
// rounded to 8 or 16 bits with one scale. Sums of products are exact, and become f32 once.
#pragma once
#include "attention_bf16_dot.hpp"

#if OCTAVO_HAS_DPBF16 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define OCTAVO_DOTS_BYTES 1
#else
#define OCTAVO_DOTS_BYTES 0
#endif

#if OCTAVO_DOTS_BYTES
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

// kQueryBytes: of a query's number. kAsksForWholeTiles: of the next span's tiles as a whole; else half a tile after the other.
template <int kMaxDim, int kQueryBytes, bool kAsksForWholeTiles>
struct ByteScores {
  // A packed query: what its scores are to be multiplied by; what its sums begin with, for each byte; its codes, four high
  // bytes (and four low ones) after each other.
  static constexpr int kQueryFactor = 0, kQueryBegin = 1, kQueryCodes = 16, kQueryWords = kQueryCodes + kMaxDim / 4 * kQueryBytes;
  static constexpr float kMaxQuery = kQueryBytes == 1 ? 127.f : 127.f * 256;
  static constexpr int kItemBytes = 0;  // no K tile is prepared
  static constexpr int vectors_for(int rows) { return 2 * rows * kQueryBytes <= kAccumulators ? 2 : 1; }

  // A query with a NaN or an infinity has a NaN for its factor; one of numbers below 1e-30 is 0.
  static void pack_query(const float* x, F16 scale, int head_dim, uint32_t* q) {
    __m512i largest = _mm512_setzero_si512();
    for (int d = 0; d < head_dim; d += 16) {
      const __m512i bits = _mm512_and_si512(_mm512_castps_si512(mul(load(x + d), scale).v), _mm512_set1_epi32(0x7fffffff));
      largest = _mm512_maskz_max_epu32(0xffff, largest, bits);
    }
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(max_bits(largest)));
    const bool is_finite = most - most == 0.f, is_zero = most < 1e-30f;
    const F16 steps = set1(is_finite && !is_zero ? kMaxQuery / most : 0.f);
    __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int d = 0; d < head_dim; d += 16) {
      const __m512i whole = is_finite ? whole_from_float(mul(mul(load(x + d), scale), steps)) : _mm512_setzero_si512();
      __m512i bytes[2] = {whole, _mm512_setzero_si512()};
      if (kQueryBytes == 2) {
        bytes[0] = _mm512_maskz_srai_epi32(0xffff, _mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        bytes[1] = _mm512_sub_epi32(whole, _mm512_maskz_slli_epi32(0xffff, bytes[0], 8));
      }
      for (int i = 0; i < kQueryBytes; i++) {
        alignas(16) uint32_t words[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm512_maskz_cvtepi32_epi8(0xffff, bytes[i]));
        for (int word = 0; word < 4; word++) q[kQueryCodes + (d / 4 + word) * kQueryBytes + i] = words[word];
        sum[i] = _mm512_add_epi32(sum[i], bytes[i]);
      }
    }
    const float factor = is_finite ? is_zero ? 0.f : most / kMaxQuery : __builtin_nanf("");
    std::memcpy(q + kQueryFactor, &factor, sizeof factor);
    for (int i = 0; i < kQueryBytes; i++)  // codes of K are read with 128 added
      q[kQueryBegin + i] = static_cast<uint32_t>(-128 * _mm512_reduce_add_epi32(sum[i]));
  }

  // note(row, column, first, second): of the scores of two tiles, where it notes them.
  template <int kRows, int kTiles, bool kPrefetch, class Note = NothingNoted>
  OCTAVO_INLINE void scores(const uint8_t* const* k, const uint8_t* const* next, const uint32_t* q, int head_dim,
                            const float* scales, float (*out)[kSpanKeys], int column, Note note = {}) {
    __m512i sum[kRows][kTiles][kQueryBytes];
    for (int r = 0; r < kRows; r++)
      for (int t = 0; t < kTiles; t++)
        for (int i = 0; i < kQueryBytes; i++) sum[r][t][i] = set1_word(q[r * kQueryWords + kQueryBegin + i]);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const int lines = head_dim / 4;
    for (int base = 0; base < lines; base += 4) {
      const uint8_t* ask = line_to_ask(next, base * kTiles, lines);
#pragma GCC unroll 4
      for (int line = base; line < base + 4; line++) {
        __m512i key[kTiles];
        for (int t = 0; t < kTiles; t++) {
          key[t] = _mm512_xor_si512(load_fours(k[t] + line * 64), sign);
          if (kPrefetch && !kAsksForWholeTiles) prefetch_line(ask, (line - base) * kTiles + t);
          if (kPrefetch && kAsksForWholeTiles) prefetch_line(next[t], line);
          if (kPrefetch && kAsksForWholeTiles && line < head_dim / 8 + 2) prefetch_line(next[t], lines + line);  // V after K
          if (kPrefetch) prefetch_soon(k[t + kTiles], line);
        }
        for (int r = 0; r < kRows; r++) {
          for (int i = 0; i < kQueryBytes; i++) {
            const __m512i x = set1_word(q[r * kQueryWords + kQueryCodes + line * kQueryBytes + i]);
            for (int t = 0; t < kTiles; t++) add_fours(sum[r][t][i], key[t], x);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      float factor;
      std::memcpy(&factor, q + r * kQueryWords + kQueryFactor, sizeof factor);
      F16 score[kTiles];
      for (int t = 0; t < kTiles; t++) {
        __m512i whole = sum[r][t][0];
        if (kQueryBytes == 2) whole = _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, whole, 8), sum[r][t][kQueryBytes - 1]);
        score[t] = mul(whole_to_float(whole), mul(load(scales + column + t * 16), set1(factor)));
        store(&out[r][column + t * 16], score[t]);
      }
      if constexpr (Note::kNotes) note(r, column, score[0], score[1]);
    }
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
#endif
