// Sixteen int32 lanes and the one thing that they are for: sums of products of four weights (codes of a byte) and four
// rounded activations (signed bytes, -127 to 127). No step saturates, so the sums are exact on every instruction set.
#pragma once
#include "simd.hpp"
#include "half_float.hpp"
#include "weight_groups.hpp"

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512F__)
struct I16 {
  __m512i v;
};
using Codes = __m512i;
OCTAVO_INLINE I16 set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE F16 to_float(I16 a) { return {_mm512_maskz_cvtepi32_ps(0xffff, a.v)}; }
OCTAVO_INLINE I16 add_int(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE I16 times_128(I16 a) { return {_mm512_maskz_slli_epi32(0xffff, a.v, 7)}; }
OCTAVO_INLINE Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
OCTAVO_INLINE Codes low_codes(Codes c) { return _mm512_and_si512(c, _mm512_set1_epi8(0xf)); }
OCTAVO_INLINE Codes high_codes(Codes c) { return _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, c, 4), _mm512_set1_epi8(0xf)); }
OCTAVO_INLINE F16 load_f16(const uint8_t* p) {
  return {_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// The pairs of minima of two groups (weight_groups.hpp); each is `stride` bytes behind the one before.
OCTAVO_INLINE Codes load_minima(const uint8_t* p, size_t stride) {
  const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_maskz_inserti64x4(0xff, first, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + stride)), 1);
}
OCTAVO_INLINE I16 first_of_pairs(Codes c) { return {_mm512_maskz_srai_epi32(0xffff, _mm512_maskz_slli_epi32(0xffff, c, 16), 16)}; }
OCTAVO_INLINE I16 second_of_pairs(Codes c) { return {_mm512_maskz_srai_epi32(0xffff, c, 16)}; }
// sum + products of pairs of int16, which must not overflow. Not the intrinsic: with that, gcc moves all sums to and fro.
OCTAVO_INLINE I16 add_pairs(I16 sum, Codes pairs, int32_t two) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(pairs), "v"(_mm512_set1_epi32(two)));
  return sum;
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi32(two)))};
#endif
}
#if defined(__AVX512VNNI__)
constexpr bool kSignedBytes = false;
template <WeightsDtype kDtype>
OCTAVO_INLINE I16 add_products(I16 sum, Codes codes, int32_t four) {
  return {_mm512_dpbusd_epi32(sum.v, codes, _mm512_set1_epi32(four))};
}
#else
// Pairs of products are added in 16 bits: 2 * 15 * 127, or 2 * 128 * 127 with the sign moved to the activations.
constexpr bool kSignedBytes = true;
template <WeightsDtype kDtype>
OCTAVO_INLINE I16 add_products(I16 sum, Codes codes, int32_t four) {
  __m512i x = _mm512_set1_epi32(four);
  if (kDtype == WeightsDtype::int8) {
    codes = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
    codes = _mm512_abs_epi8(codes);
  }
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)))};
}
#endif
#elif defined(__AVX2__)
struct I16 {
  __m256i a, b;
};
using Codes = I16;
OCTAVO_INLINE I16 set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
OCTAVO_INLINE I16 add_int(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
OCTAVO_INLINE I16 times_128(I16 a) { return {_mm256_slli_epi32(a.a, 7), _mm256_slli_epi32(a.b, 7)}; }
OCTAVO_INLINE Codes load_codes(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
OCTAVO_INLINE Codes low_codes(Codes c) {
  const __m256i mask = _mm256_set1_epi8(0xf);
  return {_mm256_and_si256(c.a, mask), _mm256_and_si256(c.b, mask)};
}
OCTAVO_INLINE Codes high_codes(Codes c) { return low_codes({_mm256_srli_epi32(c.a, 4), _mm256_srli_epi32(c.b, 4)}); }
OCTAVO_INLINE F16 load_f16(const uint8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE Codes load_minima(const uint8_t* p, size_t stride) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + stride))};
}
OCTAVO_INLINE I16 second_of_pairs(Codes c) { return {_mm256_srai_epi32(c.a, 16), _mm256_srai_epi32(c.b, 16)}; }
OCTAVO_INLINE I16 first_of_pairs(Codes c) { return second_of_pairs({_mm256_slli_epi32(c.a, 16), _mm256_slli_epi32(c.b, 16)}); }
OCTAVO_INLINE I16 add_pairs(I16 sum, Codes pairs, int32_t two) {
  const __m256i x = _mm256_set1_epi32(two);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, x)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, x))};
}
constexpr bool kSignedBytes = true;
template <WeightsDtype kDtype>
OCTAVO_INLINE __m256i add_products_half_(__m256i sum, __m256i codes, __m256i x) {
  if (kDtype == WeightsDtype::int8) {
    codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    x = _mm256_sign_epi8(x, codes);
    codes = _mm256_abs_epi8(codes);
  }
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
// Pairs of products are added in 16 bits: 2 * 15 * 127, or 2 * 128 * 127 with the sign moved to the activations.
template <WeightsDtype kDtype>
OCTAVO_INLINE I16 add_products(I16 sum, Codes codes, int32_t four) {
  const __m256i x = _mm256_set1_epi32(four);
  return {add_products_half_<kDtype>(sum.a, codes.a, x), add_products_half_<kDtype>(sum.b, codes.b, x)};
}
#else
struct I16 {
  I4_ v[4];
};
using Codes = I16;
#define OCTAVO_EACH_INT(expression) \
  I16 r;                            \
  for (int i = 0; i < 4; i++) r.v[i] = (expression); \
  return r
OCTAVO_INLINE I16 set1_int(int32_t x) { OCTAVO_EACH_INT((I4_{x, x, x, x})); }
OCTAVO_INLINE F16 to_float(I16 a) {
  F16 r;
  for (int i = 0; i < 4; i++) r.v[i] = __builtin_convertvector(a.v[i], F4_);
  return r;
}
OCTAVO_INLINE I16 add_int(I16 a, I16 b) { OCTAVO_EACH_INT(a.v[i] + b.v[i]); }
OCTAVO_INLINE I16 times_128(I16 a) { OCTAVO_EACH_INT(a.v[i] * 128); }
OCTAVO_INLINE Codes load_codes(const uint8_t* p) {
  I16 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
OCTAVO_INLINE Codes low_codes(Codes c) { OCTAVO_EACH_INT(c.v[i] & 0x0f0f0f0f); }
OCTAVO_INLINE Codes high_codes(Codes c) { OCTAVO_EACH_INT((c.v[i] >> 4) & 0x0f0f0f0f); }
OCTAVO_INLINE F16 load_f16(const uint8_t* p) {
  float out[16];
  for (int i = 0; i < 16; i++) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    out[i] = from_f16(half);
  }
  return load(out);
}
OCTAVO_INLINE Codes load_minima(const uint8_t* p, size_t stride) {
  I16 r;
  std::memcpy(&r, p, sizeof r / 2);
  std::memcpy(&r.v[2], p + stride, sizeof r / 2);
  return r;
}
OCTAVO_INLINE I16 first_of_pairs(Codes c) { OCTAVO_EACH_INT((c.v[i] << 16) >> 16); }
OCTAVO_INLINE I16 second_of_pairs(Codes c) { OCTAVO_EACH_INT(c.v[i] >> 16); }
OCTAVO_INLINE I16 add_pairs(I16 sum, Codes pairs, int32_t two) {
  const int32_t first = static_cast<int16_t>(two), second = two >> 16;
  OCTAVO_EACH_INT(sum.v[i] + ((pairs.v[i] << 16) >> 16) * first + (pairs.v[i] >> 16) * second);
}
#if defined(__ARM_NEON) && defined(__aarch64__)
// Codes as signed bytes: those of 4 bits are small, those of int8 have their highest bit turned.
constexpr bool kSignedBytes = true;
template <WeightsDtype kDtype>
OCTAVO_INLINE I16 add_products(I16 sum, Codes codes, int32_t four) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < 4; i++) {
    int8x16_t c = vreinterpretq_s8_s32((int32x4_t)codes.v[i]);
    if (kDtype == WeightsDtype::int8) c = veorq_s8(c, vdupq_n_s8(-128));
#if defined(__ARM_FEATURE_DOTPROD)
    sum.v[i] = (I4_)vdotq_s32((int32x4_t)sum.v[i], c, x);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(x))), high = vpaddlq_s16(vmull_high_s8(c, x));
    sum.v[i] = (I4_)vaddq_s32((int32x4_t)sum.v[i], vpaddq_s32(low, high));
#endif
  }
  return sum;
}
#else
constexpr bool kSignedBytes = false;
template <WeightsDtype kDtype>
OCTAVO_INLINE I16 add_products(I16 sum, Codes codes, int32_t four) {
  for (int j = 0; j < 4; j++) {
    const int32_t x = static_cast<int8_t>(four >> (8 * j));
    for (int i = 0; i < 4; i++) sum.v[i] += ((codes.v[i] >> (8 * j)) & 0xff) * x;
  }
  return sum;
}
#endif
#undef OCTAVO_EACH_INT
#endif

// What add_products takes a code to be more than the number that it stands for.
constexpr int lane_offset(WeightsDtype dtype) {
  return kSignedBytes && dtype == WeightsDtype::int8 ? 0 : code_offset(dtype);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
