// Sixteen float lanes, the same meaning on every instruction set. Included only by files that are compiled once per
// instruction set (OCTAVO_ISA names the namespace). Everything here is static: the linker must never merge a function
// that was compiled for a newer instruction set into an older path.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "half_float.hpp"

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define OCTAVO_HAS_DPBF16 1
#else
#define OCTAVO_HAS_DPBF16 0
#endif

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
struct F16 {
  __m512 v;
};
OCTAVO_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 max(F16 a, F16 b) { return {_mm512_maskz_max_ps(0xffff, a.v, b.v)}; }
OCTAVO_INLINE F16 min(F16 a, F16 b) { return {_mm512_maskz_min_ps(0xffff, a.v, b.v)}; }
OCTAVO_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
OCTAVO_INLINE F16 round_nearest(F16 a) { return {_mm512_maskz_roundscale_ps(0xffff, a.v, 8)}; }
OCTAVO_INLINE F16 scale_by_power(F16 a, F16 n) { return {_mm512_maskz_scalef_ps(0xffff, a.v, n.v)}; }  // a * 2^n, n integral
// where a < b: x, elsewhere (also for NaN): y
OCTAVO_INLINE F16 select_below(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}
// lanes 0 .. count - 1 of a, the rest from b
OCTAVO_INLINE F16 first_lanes(F16 a, F16 b, int count) {
  return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>((1u << count) - 1u), a.v)};
}
// lanes 0 .. count - 1 (count < 16) from or to memory, which is not touched beyond them; the rest reads as 0
OCTAVO_INLINE F16 load_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), p)};
}
OCTAVO_INLINE void store_first(float* p, F16 a, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1u), a.v);
}
// 16 pairs of bf16 -> the first (low half) or second (high half) of each pair
OCTAVO_INLINE F16 low_bf16(const void* p) { return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_loadu_si512(p), 16))}; }
OCTAVO_INLINE F16 high_bf16(const void* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
OCTAVO_INLINE F16 widen_bf16(const void* p) {  // 16 numbers
  const __m512i words = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, words, 16))};
}
// 16 pairs of f16 -> the first (part 0, low half) or second of each pair; needs F16C, as every AVX2 level here has
OCTAVO_INLINE F16 part_f16(const void* p, int part) {
  const __m512i words = _mm512_maskz_srl_epi32(0xffff, _mm512_loadu_si512(p), _mm_cvtsi32_si128(16 * part));
  return {_mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, words))};
}
#elif defined(__AVX2__)
struct F16 {
  __m256 a, b;
};
OCTAVO_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
OCTAVO_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OCTAVO_INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OCTAVO_INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OCTAVO_INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OCTAVO_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OCTAVO_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
OCTAVO_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
OCTAVO_INLINE F16 round_nearest(F16 x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
OCTAVO_INLINE __m256 power_of_two_(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
OCTAVO_INLINE F16 scale_by_power(F16 x, F16 n) {  // n in [-126, 128]; below, flushed to 0
  const __m256 low = _mm256_set1_ps(-126.f);
  const __m256 ka = _mm256_cmp_ps(n.a, low, _CMP_GE_OQ), kb = _mm256_cmp_ps(n.b, low, _CMP_GE_OQ);
  return {_mm256_and_ps(ka, _mm256_mul_ps(x.a, power_of_two_(_mm256_max_ps(n.a, low)))),
          _mm256_and_ps(kb, _mm256_mul_ps(x.b, power_of_two_(_mm256_max_ps(n.b, low))))};
}
OCTAVO_INLINE F16 select_below(F16 a, F16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)), _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
OCTAVO_INLINE __m256i first_mask_(int count) {  // all ones in lanes 0 .. count - 1
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
OCTAVO_INLINE F16 first_lanes(F16 x, F16 y, int count) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(first_mask_(count))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(first_mask_(count - 8)))};
}
OCTAVO_INLINE F16 load_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, first_mask_(count)), _mm256_maskload_ps(p + 8, first_mask_(count - 8))};
}
OCTAVO_INLINE void store_first(float* p, F16 x, int count) {
  _mm256_maskstore_ps(p, first_mask_(count), x.a);
  _mm256_maskstore_ps(p + 8, first_mask_(count - 8), x.b);
}
OCTAVO_INLINE F16 low_bf16(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
OCTAVO_INLINE F16 high_bf16(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  const __m256i m = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), m)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), m))};
}
OCTAVO_INLINE F16 widen_bf16(const void* p) {  // 16 numbers
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
OCTAVO_INLINE __m256 half_f16_(const __m256i* p, int part) {
  const __m256i words = _mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256(p), _mm_cvtsi32_si128(16 * part)), _mm256_set1_epi32(0xffff));
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
OCTAVO_INLINE F16 part_f16(const void* p, int part) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {half_f16_(q, part), half_f16_(q + 1, part)};
}
#else  // portable: four vectors of four, which every compiler keeps in SSE2 or NEON registers
typedef float F4_ __attribute__((vector_size(16)));
typedef int32_t I4_ __attribute__((vector_size(16)));
struct F16 {
  F4_ v[4];
};
#define OCTAVO_EACH(expression) \
  F16 r;                        \
  for (int i = 0; i < 4; i++) r.v[i] = (expression); \
  return r
OCTAVO_INLINE F16 load(const float* p) {
  F16 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
OCTAVO_INLINE void store(float* p, F16 a) { std::memcpy(p, &a, sizeof a); }
OCTAVO_INLINE F16 set1(float x) { OCTAVO_EACH((F4_{x, x, x, x})); }
OCTAVO_INLINE F16 add(F16 a, F16 b) { OCTAVO_EACH(a.v[i] + b.v[i]); }
OCTAVO_INLINE F16 sub(F16 a, F16 b) { OCTAVO_EACH(a.v[i] - b.v[i]); }
OCTAVO_INLINE F16 mul(F16 a, F16 b) { OCTAVO_EACH(a.v[i] * b.v[i]); }
OCTAVO_INLINE F16 div(F16 a, F16 b) { OCTAVO_EACH(a.v[i] / b.v[i]); }
OCTAVO_INLINE F16 max(F16 a, F16 b) { OCTAVO_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
OCTAVO_INLINE F16 min(F16 a, F16 b) { OCTAVO_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
OCTAVO_INLINE F16 select_below(F16 a, F16 b, F16 x, F16 y) { OCTAVO_EACH(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
#if defined(__ARM_NEON) && defined(__aarch64__)
OCTAVO_INLINE F16 fma(F16 a, F16 b, F16 c) {
  OCTAVO_EACH((F4_)vfmaq_f32((float32x4_t)c.v[i], (float32x4_t)a.v[i], (float32x4_t)b.v[i]));
}
#else
OCTAVO_INLINE F16 fma(F16 a, F16 b, F16 c) { OCTAVO_EACH(a.v[i] * b.v[i] + c.v[i]); }  // two roundings (-ffp-contract=off)
#endif
// |a| < 2^22: there, adding 1.5 * 2^23 leaves no bits for a fraction
OCTAVO_INLINE F16 round_nearest(F16 a) { OCTAVO_EACH((a.v[i] + 12582912.f) - 12582912.f); }
OCTAVO_INLINE F16 scale_by_power(F16 a, F16 n) {  // n in [-126, 128]; below, flushed to 0
  F16 r;
  for (int i = 0; i < 4; i++) {
    const F4_ low = {-126.f, -126.f, -126.f, -126.f};
    const F4_ c = n.v[i] < low ? low : n.v[i];
    const I4_ bits = (__builtin_convertvector(c, I4_) + 127) << 23;
    const F4_ scaled = a.v[i] * (F4_)bits;
    r.v[i] = n.v[i] >= low ? scaled : F4_{};
  }
  return r;
}
OCTAVO_INLINE F16 first_lanes(F16 a, F16 b, int count) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  for (int i = 0; i < count; i++) y[i] = x[i];
  return load(y);
}
OCTAVO_INLINE F16 load_first(const float* p, int count) {
  float x[16] = {};
  for (int i = 0; i < count; i++) x[i] = p[i];
  return load(x);
}
OCTAVO_INLINE void store_first(float* p, F16 a, int count) {
  float x[16];
  store(x, a);
  for (int i = 0; i < count; i++) p[i] = x[i];
}
OCTAVO_INLINE F16 low_bf16(const void* p) {
  I4_ w[4];
  std::memcpy(w, p, sizeof w);
  OCTAVO_EACH((F4_)(w[i] << 16));
}
OCTAVO_INLINE F16 high_bf16(const void* p) {
  I4_ w[4];
  std::memcpy(w, p, sizeof w);
  OCTAVO_EACH((F4_)(w[i] & static_cast<int32_t>(0xffff0000u)));
}
OCTAVO_INLINE F16 widen_bf16(const void* p) {  // 16 numbers
  uint16_t bits[16];
  uint32_t words[16];
  std::memcpy(bits, p, sizeof bits);
  for (int i = 0; i < 16; i++) words[i] = static_cast<uint32_t>(bits[i]) << 16;
  F16 r;
  std::memcpy(&r, words, sizeof r);
  return r;
}
OCTAVO_INLINE F16 part_f16(const void* p, int part) {
  uint16_t bits[32];
  float x[16];
  std::memcpy(bits, p, sizeof bits);
  for (int i = 0; i < 16; i++) x[i] = from_f16(bits[2 * i + part]);
  return load(x);
}
#undef OCTAVO_EACH
#endif

OCTAVO_INLINE F16 zero() { return set1(0.f); }
// Reductions in one fixed tree of lanes, on every instruction set.
OCTAVO_INLINE float reduce_add(F16 a) {
  float v[16];
  store(v, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] + v[i + width];
  return v[0];
}
OCTAVO_INLINE float reduce_max(F16 a) {
  float v[16];
  store(v, a);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
}
// float -> bfloat16 bits, nearest even; NaN stays a quiet NaN (kv_formats/bf16.py)
OCTAVO_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
OCTAVO_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
// the bits of 16 numbers as to_bf16 makes them
OCTAVO_INLINE void store_bf16(uint16_t* p, F16 a) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512(a.v), top = _mm512_maskz_srli_epi32(0xffff, bits, 16);
  const __m512i even = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), even));
  const __m512i rounded = _mm512_mask_or_epi32(_mm512_maskz_srli_epi32(0xffff, sum, 16), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q),
                                               top, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, rounded));
#else
  float x[16];
  store(x, a);
  for (int i = 0; i < 16; i++) p[i] = to_bf16(x[i]);
#endif
}
// 2^x for x in [-1/2, 1/2]: degree 5, relative error about 2e-7
OCTAVO_INLINE F16 exp2_fraction(F16 f) {
  F16 y = fma(set1(0.00132764715f), f, set1(0.00967554133f));
  y = fma(y, f, set1(0.0555071327f));
  y = fma(y, f, set1(0.240221197f));
  y = fma(y, f, set1(0.693146967f));
  return fma(y, f, set1(1.f));
}
// 2^x for x at most 127; x below -126 gives 0 or a denormal, never an error
OCTAVO_INLINE F16 exp2_lanes(F16 x) {
  x = max(x, set1(-200.f));
  const F16 n = round_nearest(x);
  return scale_by_power(exp2_fraction(sub(x, n)), n);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
