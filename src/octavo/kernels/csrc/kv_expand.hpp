// Tiles of small codes become tiles of bf16, whose values are exactly those of the codes (int8: without the scales, which
// attention multiplies in): [head_dim / 2][16][2] and [8][head_dim][2].
#pragma once
#include "attention_tiles.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// What codes of 8 bits mean: their bf16 bits for codes 0 to 127, and how the others follow from them.
struct CodeTable {
  alignas(64) uint8_t low[128], high[128];  // the two bytes of the bits
  uint16_t all[256];
  bool is_signed;  // two's complement; else the highest bit is a sign
};

constexpr uint16_t bf16_of_whole(int value) {  // 0 .. 255
  if (value == 0) return 0;
  int exponent = 0;
  while (value >> (exponent + 1)) exponent++;
  return static_cast<uint16_t>((127 + exponent) << 7 | ((value << 7 >> exponent) & 0x7f));
}

// kv_formats/small_float.py: `fraction` bits of fraction, and the exponents' bias
constexpr uint16_t bf16_of_fp8(int code, int fraction, int bias) {
  const int exponent = code >> fraction, rest = code & ((1 << fraction) - 1);
  if (fraction == 3 && code == 0x7f) return 0x7fc0;
  if (fraction == 2 && code >= 0x7c) return code == 0x7c ? 0x7f80 : 0x7fc0;
  if (exponent) return static_cast<uint16_t>((exponent - bias + 127) << 7 | rest << (7 - fraction));
  const uint16_t whole = bf16_of_whole(rest);  // times 2^(1 - bias - fraction)
  return rest ? static_cast<uint16_t>(whole - ((bias + fraction - 1) << 7)) : uint16_t{0};
}

constexpr CodeTable make_code_table(KVFormat format) {
  CodeTable table = {};
  table.is_signed = !(format == KVFormat::fp8_e4m3 || format == KVFormat::fp8_e5m2);
  for (int code = 0; code < 128; code++) {
    const uint16_t bits = format == KVFormat::fp8_e4m3   ? bf16_of_fp8(code, 3, 7)
                          : format == KVFormat::fp8_e5m2 ? bf16_of_fp8(code, 2, 15)
                                                         : bf16_of_whole(code);
    table.low[code] = static_cast<uint8_t>(bits & 0xff);
    table.high[code] = static_cast<uint8_t>(bits >> 8);
    table.all[code] = bits;
    const int negative = table.is_signed ? (256 - code) & 0xff : code | 0x80;
    if (negative != code) table.all[negative] = bits | 0x8000;
  }
  if (table.is_signed) table.all[128] = 0xc300;  // -128, which no encoder makes
  return table;
}

static constexpr CodeTable kInt8Codes = make_code_table(KVFormat::int8);
static constexpr CodeTable kE4M3Codes = make_code_table(KVFormat::fp8_e4m3);
static constexpr CodeTable kE5M2Codes = make_code_table(KVFormat::fp8_e5m2);

static inline const CodeTable& code_table(KVFormat format) {
  return format == KVFormat::fp8_e4m3 ? kE4M3Codes : format == KVFormat::fp8_e5m2 ? kE5M2Codes : kInt8Codes;
}

// A line of sixteen fours of codes (kv_formats/quads.py) -> sixteen pairs of the first two, and of the last two.
#if defined(__AVX512VBMI__)
template <bool kSigned>
struct CodeLines {
  __m512i low0, low1, high0, high1;
  explicit CodeLines(const CodeTable& table)
      : low0(_mm512_load_si512(table.low)), low1(_mm512_load_si512(table.low + 64)), high0(_mm512_load_si512(table.high)),
        high1(_mm512_load_si512(table.high + 64)) {}

  inline __attribute__((always_inline)) void widen(const uint8_t* from, __m512i& first, __m512i& second) const {
    const __m512i code = _mm512_loadu_si512(from), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i index = kSigned ? _mm512_maskz_abs_epi8(~__mmask64{0}, code) : code;
    const __m512i low = _mm512_permutex2var_epi8(low0, index, low1);
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high0, index, high1), code, sign, 0xf8);  // a | b & c
    first = _mm512_maskz_unpacklo_epi8(~__mmask64{0}, low, high);
    second = _mm512_maskz_unpackhi_epi8(~__mmask64{0}, low, high);
  }
  inline __attribute__((always_inline)) void expand(const uint8_t* from, uint8_t* first, uint8_t* second) const {
    __m512i one, two;
    widen(from, one, two);
    _mm512_storeu_si512(first, one);
    _mm512_storeu_si512(second, two);
  }
};
#else
template <bool kSigned>
struct CodeLines {
  const uint16_t* all;
  explicit CodeLines(const CodeTable& table) : all(table.all) {}

  inline __attribute__((always_inline)) void expand(const uint8_t* from, uint8_t* first, uint8_t* second) const {
    uint16_t pairs[2][32];
    for (int four = 0; four < 4; four++)
      for (int part = 0; part < 2; part++)
        for (int i = 0; i < 8; i++) pairs[part][four * 8 + i] = all[from[four * 16 + part * 8 + i]];
    std::memcpy(first, pairs[0], 64);
    std::memcpy(second, pairs[1], 64);
  }
};
#endif

// K tile of fours -> [head_dim / 2][16][2]; lines of `next` are asked for on the way
template <bool kSigned>
OCTAVO_INLINE void expand_k(const CodeLines<kSigned> codes, const uint8_t* tile, int head_dim, const uint8_t* next, uint8_t* out) {
  for (int line = 0; line < head_dim / 4; line++) {
    if (next) prefetch_line(next, line);
    codes.expand(tile + line * 64, out + line * 128, out + line * 128 + 64);
  }
}

// V tile of fours -> [8][head_dim][2]
template <bool kSigned>
OCTAVO_INLINE void expand_v(const CodeLines<kSigned> codes, const uint8_t* tile, int head_dim, const uint8_t* next, uint8_t* out) {
  for (int quad = 0; quad < 4; quad++) {
    uint8_t* to = out + static_cast<size_t>(quad) * head_dim * 8;
    for (int d = 0; d < head_dim; d += 16) {
      const int at = quad * head_dim * 4 + d * 4;
      if (next) prefetch_line(next, at / 64);
      codes.expand(tile + at, to + d * 4, to + (head_dim + d) * 4);
    }
  }
}

// The 16 scales of a tile.
OCTAVO_INLINE void expand_scales(const uint8_t* bits, float* out) { store(out, widen_bf16(bits)); }

alignas(64) static const float kCodesOf4[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The bf16 numbers of two codes of 4 bits that lie beside each other: 16 for the first, 16 for the second. (Where bf16 pairs
// are multiplied, numbers too small to be normal are 0, here as there.)
struct PairTable {
#if OCTAVO_HAS_DPBF16
  __m512i values;
  PairTable(F16 first, F16 second) : values((__m512i)_mm512_cvtne2ps_pbh(second.v, first.v)) {}
  __m512i all() const { return values; }
#else
  alignas(64) uint16_t values[32];
  PairTable(F16 first, F16 second) {
    store_bf16(values, first);
    store_bf16(values + 16, second);
  }
#if defined(__AVX512BW__)
  __m512i all() const { return _mm512_load_si512(values); }
#endif
#endif

  // of sixteen words, in which bits `shift` (0, 4, 16 or 20) to `shift` + 3 and 8 bits further up are codes
  OCTAVO_INLINE void look_up(const PairTable& table, const uint8_t* words, int shift, uint8_t* to) {
#if defined(__AVX512BW__)
    const __m128i first = _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);  // bytes 0 and 1 of words
    const __m128i order = shift < 16 ? first : _mm_add_epi8(first, _mm_set1_epi16(2));
    __m512i code = _mm512_loadu_si512(words);
    if (shift % 8) code = _mm512_maskz_srli_epi16(0xffffffffu, code, 4);
    code = _mm512_maskz_shuffle_epi8(~__mmask64{0}, code, _mm512_maskz_broadcast_i32x4(0xffff, order));
    const __m512i index = _mm512_ternarylogic_epi32(code, _mm512_set1_epi32(0xf000f), _mm512_set1_epi32(0x100000), 0xea);  // a & b | c
    _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi16(0xffffffffu, index, table.all()));
#else
    uint16_t* bits = reinterpret_cast<uint16_t*>(to);
    for (int i = 0; i < 16; i++) {
      uint32_t word;
      std::memcpy(&word, words + 4 * i, 4);
      bits[2 * i] = table.values[word >> shift & 15];
      bits[2 * i + 1] = table.values[16 + (word >> (shift + 8) & 15)];
    }
#endif
  }
};

// The table of codes whose scales and minima are those of places i and i + 1. The product is exact.
OCTAVO_INLINE PairTable pair_table(const float* scales, const float* minima, int i) {
  const F16 codes = load(kCodesOf4);
  return PairTable(fma(codes, set1(scales[i]), set1(minima[i])), fma(codes, set1(scales[i + 1]), set1(minima[i + 1])));
}

// K tile of 4-bit codes [head_dim / 8][16][4], scales, minima -> [head_dim / 2][16][2]
static inline void expand_k4(const uint8_t* tile, int head_dim, const uint8_t* next, uint8_t* out) {
  alignas(64) float scales[kMaxHeadDim], minima[kMaxHeadDim];
  for (int d = 0; d < head_dim; d += 16) {
    expand_scales(tile + head_dim * 8 + d * 2, scales + d);
    expand_scales(tile + head_dim * 10 + d * 2, minima + d);
  }
  for (int octet = 0; octet < head_dim / 8; octet++) {
    if (next) prefetch_line(next, octet);
    if (next && octet % 2) prefetch_line(next, head_dim / 8 + octet / 2);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; pair++)
      PairTable::look_up(pair_table(scales, minima, octet * 8 + 2 * pair), tile + octet * 64, 16 * (pair % 2) + 4 * (pair / 2),
                         out + (octet * 4 + pair) * 64);
  }
}

// V tile of 4-bit codes [4][head_dim / 32][16][4], scales, minima -> [8][head_dim][2]
static inline void expand_v4(const uint8_t* tile, int head_dim, const uint8_t* next, uint8_t* out) {
  alignas(64) float scales[kTileTokens], minima[kTileTokens];
  expand_scales(tile + head_dim * 8, scales);
  expand_scales(tile + head_dim * 8 + 2 * kTileTokens, minima);
#pragma GCC unroll 8
  for (int pair = 0; pair < kTileTokens / 2; pair++) {
    const PairTable table = pair_table(scales, minima, 2 * pair);
    for (int d = 0; d < head_dim; d += 32) {
      const int at = pair / 2 * head_dim * 2 + d * 2;
      if (next && pair % 2 == 0) prefetch_line(next, at / 64);
      uint8_t* to = out + (static_cast<size_t>(pair) * head_dim + d) * 4;
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) PairTable::look_up(table, tile + at, 16 * (pair % 2) + 4 * half, to + half * 64);
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
