// Weights of tokens as whole numbers, and their exact sums. Every step below is one rounding of IEEE arithmetic, none is
// fused: the numbers are those of kernels/draw.py on every instruction set.
#pragma once
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kHighestWeight = 4294967296.f;  // 2^32
constexpr double kLeastTemperature = 1e-30;     // below it a float is 0

constexpr float kNoWeight = -23.f;              // x below it has weight 0: e^-23 * 2^32 is 0.44

// To a whole number, nearest, ties to even; a from 0 on.
OCTAVO_INLINE F16 round_whole(F16 a) {
#if defined(__AVX512F__) || defined(__AVX2__)
  return round_nearest(a);
#else
  // A float of 2^23 or more is whole; to a smaller one, adding 2^23 leaves no bits for a fraction.
  const F16 low = min(a, set1(8388608.f)), high = sub(a, low);
  return add(sub(add(low, set1(8388608.f)), set1(8388608.f)), high);
#endif
}

// x at most 0 -> e^x * 2^32, rounded to a whole number (nearest, ties to even)
OCTAVO_INLINE F16 weight_lanes(F16 x) {
  x = max(x, set1(-64.f));
  const F16 n = round_nearest(mul(x, set1(1.44269504f)));
  F16 r = sub(x, mul(n, set1(0.693359375f)));
  r = add(r, mul(n, set1(2.12194440e-4f)));
  F16 y = add(mul(set1(1.f / 720.f), r), set1(1.f / 120.f));
  y = add(mul(y, r), set1(1.f / 24.f));
  y = add(mul(y, r), set1(1.f / 6.f));
  y = add(mul(y, r), set1(0.5f));
  y = add(mul(y, r), set1(1.f));
  y = add(mul(y, r), set1(1.f));
  return round_whole(scale_by_power(y, add(n, set1(32.f))));
}

#if defined(__AVX512F__)
// Bit i: lane i of a is at least that of b.
OCTAVO_INLINE uint32_t not_below(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

struct ExactSum {
  __m512d a = _mm512_setzero_pd(), b = _mm512_setzero_pd();
  void add(F16 x) {
    a = _mm512_add_pd(a, _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x.v, 0)));
    b = _mm512_add_pd(b, _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x.v, 1)));
  }
  double value() const {
    double v[8], sum = 0;
    _mm512_storeu_pd(v, _mm512_add_pd(a, b));
    for (double part : v) sum += part;
    return sum;
  }
};
#elif defined(__AVX2__)
OCTAVO_INLINE uint32_t not_below(F16 a, F16 b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.a, b.a, _CMP_GE_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.b, b.b, _CMP_GE_OQ));
  return static_cast<uint32_t>(low | high << 8);
}

struct ExactSum {
  __m256d a = _mm256_setzero_pd(), b = _mm256_setzero_pd();
  void add(F16 x) {
    a = _mm256_add_pd(a, _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1))));
    b = _mm256_add_pd(b, _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))));
  }
  double value() const {
    double v[4];
    _mm256_storeu_pd(v, _mm256_add_pd(a, b));
    return v[0] + v[1] + v[2] + v[3];
  }
};
#else
OCTAVO_INLINE uint32_t not_below(F16 a, F16 b) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= static_cast<uint32_t>(x[i] >= y[i]) << i;
  return mask;
}

struct ExactSum {
  double v[4] = {};
  void add(F16 x) {
    float y[16];
    store(y, x);
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 4; j++) v[j] += static_cast<double>(y[i + j]);
  }
  double value() const { return v[0] + v[1] + v[2] + v[3]; }
};
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
