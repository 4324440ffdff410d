// The turn of kv_formats/hadamard.py, operation for operation, so bit for bit: x and out [dim], which may be the same.
#pragma once
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// Sums and differences of lanes that are kStep apart: kStep 1, 2, 4 or 8.
#if defined(__AVX512F__)
template <int kStep>
OCTAVO_INLINE F16 turn_lanes(F16 a) {
  __m512 other;
  if constexpr (kStep == 1) other = _mm512_maskz_permute_ps(0xffff, a.v, 0xb1);
  else if constexpr (kStep == 2) other = _mm512_maskz_permute_ps(0xffff, a.v, 0x4e);
  else if constexpr (kStep == 4) other = _mm512_maskz_shuffle_f32x4(0xffff, a.v, a.v, 0xb1);
  else other = _mm512_maskz_shuffle_f32x4(0xffff, a.v, a.v, 0x4e);
  constexpr __mmask16 kSecond = kStep == 1 ? 0xaaaa : kStep == 2 ? 0xcccc : kStep == 4 ? 0xf0f0 : 0xff00;
  return {_mm512_mask_sub_ps(_mm512_add_ps(a.v, other), kSecond, other, a.v)};
}
#else
template <int kStep>
OCTAVO_INLINE F16 turn_lanes(F16 a) {
  alignas(64) float x[kLanes], out[kLanes];
  store(x, a);
  for (int i = 0; i < kLanes; i += 2 * kStep) {
    for (int j = i; j < i + kStep; j++) {
      out[j] = x[j] + x[j + kStep];
      out[j + kStep] = x[j] - x[j + kStep];
    }
  }
  return load(out);
}
#endif

static inline void turn(const float* x, int dim, float* out) {
  const int size = dim & -dim;
  const F16 factor = set1(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(size))));
  for (int d = 0; d < dim; d += kLanes) {
    const F16 turned = turn_lanes<8>(turn_lanes<4>(turn_lanes<2>(turn_lanes<1>(load(x + d)))));
    store(out + d, size == kLanes ? mul(turned, factor) : turned);
  }
  for (int step = kLanes; step < size; step *= 2) {
    const bool is_last = 2 * step == size;
    for (int from = 0; from < dim; from += 2 * step) {
      for (int d = from; d < from + step; d += kLanes) {
        const F16 first = load(out + d), second = load(out + d + step);
        const F16 sum = add(first, second), difference = sub(first, second);
        store(out + d, is_last ? mul(sum, factor) : sum);
        store(out + d + step, is_last ? mul(difference, factor) : difference);
      }
    }
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
