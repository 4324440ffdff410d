// What attention needs beyond simd.hpp: how many accumulators fit in registers, powers of two that keep a NaN, hints.
#pragma once
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// Rows that are computed together, and vectors of 16 lanes that are accumulated together.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kAccumulators = 24;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int kMaxRows = 6, kAccumulators = 6;
#else
constexpr int kMaxRows = 3, kAccumulators = 3;
#endif

// Vectors beside each other for `rows` rows: 1, 2 or 4, as registers allow. Never a question of bits.
constexpr int vectors_that_fit(int rows) { return 4 * rows <= kAccumulators ? 4 : 2 * rows <= kAccumulators ? 2 : 1; }

// As reduce_add and reduce_max (the same tree of lanes), without a way through memory.
#if defined(__AVX512F__)
OCTAVO_INLINE __m256 halves_(__m512 a, int half) {
  return half ? _mm512_maskz_extractf32x8_ps(0xff, a, 1) : _mm512_maskz_extractf32x8_ps(0xff, a, 0);
}
OCTAVO_INLINE float sum_lanes(F16 a) {
  const __m256 b = _mm256_add_ps(halves_(a.v, 0), halves_(a.v, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
OCTAVO_INLINE float max_lanes(F16 a) {
  const __m256 b = _mm256_max_ps(halves_(a.v, 0), halves_(a.v, 1));
  const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
#else
OCTAVO_INLINE float sum_lanes(F16 a) { return reduce_add(a); }
OCTAVO_INLINE float max_lanes(F16 a) { return reduce_max(a); }
#endif

OCTAVO_INLINE void prefetch_line(const uint8_t* tile, int line) { __builtin_prefetch(tile + line * 64, 0, 2); }

// a * 2^n for integral n <= 127; below -126 a zero (or, with AVX-512, a denormal). A NaN stays one.
#if defined(__AVX512F__)
OCTAVO_INLINE F16 times_power_of_two(F16 a, F16 n) { return scale_by_power(a, n); }
#elif defined(__AVX2__)
OCTAVO_INLINE F16 times_power_of_two(F16 x, F16 n) {
  const __m256 low = _mm256_set1_ps(-126.f);
  const __m256 below_a = _mm256_cmp_ps(n.a, low, _CMP_LT_OQ), below_b = _mm256_cmp_ps(n.b, low, _CMP_LT_OQ);
  return {_mm256_andnot_ps(below_a, _mm256_mul_ps(x.a, power_of_two_(_mm256_max_ps(n.a, low)))),
          _mm256_andnot_ps(below_b, _mm256_mul_ps(x.b, power_of_two_(_mm256_max_ps(n.b, low))))};
}
#else
OCTAVO_INLINE F16 times_power_of_two(F16 a, F16 n) {
  const F4_ low = {-126.f, -126.f, -126.f, -126.f};
  F16 r;
  for (int i = 0; i < 4; i++) {
    const F4_ clamped = n.v[i] >= low ? n.v[i] : low;
    const F4_ product = a.v[i] * (F4_)((__builtin_convertvector(clamped, I4_) + 127) << 23);
    r.v[i] = n.v[i] < low ? F4_{} : product;
  }
  return r;
}
#endif

// 2^x for x <= 0, NaN for NaN: degree 5, relative error about 2e-7. From -200 on exactly 0; 2^0 is exactly 1.
OCTAVO_INLINE F16 weight_exp2(F16 x) {
  x = max(set1(-200.f), x);  // in this order: the second operand survives a comparison with NaN
  const F16 n = round_nearest(x), f = sub(x, n);
  F16 y = fma(set1(0.00132764715f), f, set1(0.00967554133f));
  y = fma(y, f, set1(0.0555071327f));
  y = fma(y, f, set1(0.240221197f));
  y = fma(y, f, set1(0.693146967f));
  return times_power_of_two(fma(y, f, set1(1.f)), n);
}

#if defined(__AVX512F__)
// *p in all lanes. As an integer: AMD's processors broadcast those while they load them, floats in units that products need.
OCTAVO_INLINE F16 set1_at(const float* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return {_mm512_castsi512_ps(_mm512_set1_epi32(bits))};
}

// 2^x for x below 127, NaN for NaN, for weights that are then rounded to bf16 or 8 bits: degree 3, relative error 7.5e-5; below 2^-126
// denormals, which that rounding makes 0, and 0 from -200 on; 2^0 is exactly 1. No comparison makes a mask: on AMD's
// processors the units that multiply bf16 pairs do those, as they do the three multiply-adds; the rest runs beside them.
constexpr float kExp2Terms[5] = {-200.f, 0.0551716649f, 0.242611122f, 0.693260986f, 1.f};
OCTAVO_INLINE F16 rounded_exp2(F16 x, const float* terms = kExp2Terms) {
  x = max(set1_at(terms), x);  // in this order, as in weight_exp2
  const F16 n = round_nearest(x), f = sub(x, n);
  const F16 y = fma(set1_at(terms + 1), f, set1_at(terms + 2));
  return scale_by_power(fma(fma(y, f, set1_at(terms + 3)), f, set1_at(terms + 4)), n);
}
#endif

// limit * tanh(x / limit) by e / (e + 2) with e = 2^z - 1, z = x * 2 log2(e) / limit: small x keep their bits' worth,
// since 2^f - 1 is summed apart from 2^n - 1. NaN for NaN.
OCTAVO_INLINE F16 cap_lanes(F16 x, F16 limit, F16 factor) {
  const F16 z = max(set1(-60.f), min(set1(60.f), mul(x, factor)));  // in this order, as in weight_exp2
  const F16 n = round_nearest(z), f = sub(z, n);
  F16 y = fma(set1(0.00132764715f), f, set1(0.00967554133f));
  y = fma(y, f, set1(0.0555071327f));
  y = fma(y, f, set1(0.240221197f));
  y = fma(y, f, set1(0.693146967f));
  const F16 power = times_power_of_two(set1(1.f), n);
  const F16 e = fma(mul(y, f), power, sub(power, set1(1.f)));
  return mul(limit, div(e, add(e, set1(2.f))));
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
