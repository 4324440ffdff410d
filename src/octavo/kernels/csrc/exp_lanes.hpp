// Sixteen exponentials and what is made of them, for activations. Each lane depends on its own number alone.
#pragma once
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// e^x, relative error about 3e-7; infinity above 89; NaN stays NaN. x = n ln 2 + r, with ln 2 in two parts so that n * part is exact.
OCTAVO_INLINE F16 exp_lanes(F16 x) {
  x = min(set1(89.5f), max(set1(-120.f), x));  // in this order a NaN passes
  const F16 n = round_nearest(mul(x, set1(1.44269504f)));
  F16 r = sub(x, mul(n, set1(0.693359375f)));
  r = sub(r, mul(n, set1(-2.12194440e-4f)));
  // one power of two is left to the end: 2^128 is no float, and e^88.5 is one
  const F16 power = mul(scale_by_power(exp2_fraction(mul(r, set1(1.44269504f))), sub(n, set1(1.f))), set1(2.f));
  return add(power, sub(x, x));  // + 0, or NaN
}

// 1 / (1 + e^-x); neither overflows nor loses small values early
OCTAVO_INLINE F16 sigmoid_lanes(F16 x) { return div(set1(1.f), add(set1(1.f), exp_lanes(sub(zero(), x)))); }

// gate * sigmoid(gate) * up, as gate / (1 + e^-gate) * up: the quotient neither overflows nor loses small values early.
OCTAVO_INLINE F16 silu_mul_lanes(F16 gate, F16 up) {
  return mul(div(gate, add(set1(1.f), exp_lanes(sub(zero(), gate)))), up);
}

// tanh x = 2 sigmoid(2x) - 1: absolute error about 2e-7; near 0, where that would be much, an odd polynomial
OCTAVO_INLINE F16 tanh_lanes(F16 x) {
  const F16 y = sub(mul(set1(2.f), sigmoid_lanes(add(x, x))), set1(1.f));
  const F16 square = mul(x, x);
  F16 series = fma(set1(-17.f / 315.f), square, set1(2.f / 15.f));
  series = fma(series, square, set1(-1.f / 3.f));
  series = fma(mul(series, square), x, x);
  return select_below(square, set1(0.01f), series, y);
}

// erf, absolute error about 2e-7 (Abramowitz and Stegun, 7.1.26)
OCTAVO_INLINE F16 erf_lanes(F16 x) {
  const F16 size = max(x, sub(zero(), x));
  const F16 t = div(set1(1.f), fma(set1(0.3275911f), size, set1(1.f)));
  F16 y = fma(set1(1.061405429f), t, set1(-1.453152027f));
  y = fma(y, t, set1(1.421413741f));
  y = fma(y, t, set1(-0.284496736f));
  y = fma(y, t, set1(0.254829592f));
  y = sub(set1(1.f), mul(mul(y, t), exp_lanes(sub(zero(), mul(size, size)))));
  return select_below(x, zero(), sub(zero(), y), y);
}

// x * (1 + erf(x / sqrt 2)) / 2
OCTAVO_INLINE F16 gelu_lanes(F16 x) { return mul(mul(set1(0.5f), x), add(set1(1.f), erf_lanes(mul(x, set1(0.707106781f))))); }

// x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as x * sigmoid of twice that
OCTAVO_INLINE F16 gelu_tanh_lanes(F16 x) {
  const F16 inner = mul(set1(1.59576912f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
  return mul(x, sigmoid_lanes(inner));
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
