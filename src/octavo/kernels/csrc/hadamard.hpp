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
  // other + a or other - a: times 1 or -1 is exact, so one operation does for both
  return {_mm512_fmadd_ps(a.v, _mm512_mask_blend_ps(kSecond, _mm512_set1_ps(1.f), _mm512_set1_ps(-1.f)), other)};
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

// A block of 16 kVectors numbers, in registers.
template <int kVectors>
OCTAVO_INLINE void turn_block(const float* x, F16 factor, float* out) {
  F16 v[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; i++) v[i] = turn_lanes<8>(turn_lanes<4>(turn_lanes<2>(turn_lanes<1>(load(x + i * kLanes)))));
#pragma GCC unroll 4
  for (int step = 1; step < kVectors; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; i++) {
      if (i & step) continue;
      const F16 first = v[i], second = v[i + step];
      v[i] = add(first, second);
      v[i + step] = sub(first, second);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; i++) store(out + i * kLanes, mul(v[i], factor));
}

template <int kVectors>
static void turn_blocks(const float* x, int size, float* out) {
  const F16 factor = set1(static_cast<float>(1.0 / __builtin_sqrt(16.0 * kVectors)));
  for (int d = 0; d < size; d += kVectors * kLanes) turn_block<kVectors>(x + d, factor, out + d);
}

// `count` heads of head_dim numbers, one behind the other: together, since one alone mostly waits for its own sums.
static inline void turn(const float* x, int head_dim, int count, float* out) {
  const int size = head_dim * count;
  switch (head_dim & -head_dim) {
    case 16: return turn_blocks<1>(x, size, out);
    case 32: return turn_blocks<2>(x, size, out);
    case 64: return turn_blocks<4>(x, size, out);
    case 128: return turn_blocks<8>(x, size, out);
    default: return turn_blocks<16>(x, size, out);  // 256: kMaxHeadDim
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
