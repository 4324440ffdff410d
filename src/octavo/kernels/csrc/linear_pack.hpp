// Rows of x in the order in which a tile reads them: [step][row], so that a tile reads one stream, whatever the row length.
#pragma once
#include "linear_tile.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// A packed tile may be written up to this many bytes beyond its end.
constexpr size_t kPackSlack = 64;

#if defined(__AVX512F__)
// Sixteen 32-bit units (inputs, or pairs of bf16) of a row from unit `unit` on; zeros beyond the row's end.
template <class Weights>
OCTAVO_INLINE __m512i load_units(const float* row, int num_inputs, int unit) {
#if OCTAVO_HAS_DPBF16
  if constexpr (Weights::kInputs == 2) {
    const int left = num_inputs - 2 * unit;
    const float* p = row + 2 * unit;
    const F16 low = left >= 16 ? load(p) : load_first(p, left > 0 ? left : 0);
    const F16 high = left >= 32 ? load(p + 16) : left > 16 ? load_first(p + 16, left - 16) : zero();
    return (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
  }
#endif
  const int left = num_inputs - unit;
  return _mm512_castps_si512((left >= 16 ? load(row + unit) : load_first(row + unit, left > 0 ? left : 0)).v);
}

OCTAVO_INLINE __m512i unpack_low(__m512i a, __m512i b) { return _mm512_maskz_unpacklo_epi32(0xffff, a, b); }
OCTAVO_INLINE __m512i unpack_high(__m512i a, __m512i b) { return _mm512_maskz_unpackhi_epi32(0xffff, a, b); }

// Four vectors of 16 units -> for each unit, the four rows' values side by side, written R units apart.
OCTAVO_INLINE void store_quads(int32_t* out, int rows, int count, __m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab0 = unpack_low(a, b), ab1 = unpack_high(a, b), cd0 = unpack_low(c, d), cd1 = unpack_high(c, d);
  alignas(64) int32_t quads[4][16];  // [unit % 4][unit / 4][row]
  _mm512_store_si512(quads[0], _mm512_maskz_unpacklo_epi64(0xff, ab0, cd0));
  _mm512_store_si512(quads[1], _mm512_maskz_unpackhi_epi64(0xff, ab0, cd0));
  _mm512_store_si512(quads[2], _mm512_maskz_unpacklo_epi64(0xff, ab1, cd1));
  _mm512_store_si512(quads[3], _mm512_maskz_unpackhi_epi64(0xff, ab1, cd1));
  for (int unit = 0; unit < count; unit++)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + static_cast<size_t>(unit) * rows),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(quads[unit % 4] + unit / 4 * 4)));
}

// Groups of four rows, the last first: the lanes that a group of fewer rows writes too much belong to rows that are
// written after it.
template <class Weights>
static void pack_rows(const float* x, int num_inputs, int rows, int num_units, void* packed) {
  int32_t* out = static_cast<int32_t*>(packed);
  if (rows == 1) {
    for (int unit = 0; unit < num_units; unit += 16) _mm512_storeu_si512(out + unit, load_units<Weights>(x, num_inputs, unit));
    return;
  }
  for (int first = (rows - 1) / 4 * 4; first >= 0; first -= 4) {
    const float* row = x + static_cast<size_t>(first) * num_inputs;
    const int count = rows - first;
    for (int unit = 0; unit < num_units; unit += 16) {
      __m512i v[4] = {};
      for (int r = 0; r < 4 && r < count; r++)
        v[r] = load_units<Weights>(row + static_cast<size_t>(r) * num_inputs, num_inputs, unit);
      const int units = num_units - unit < 16 ? num_units - unit : 16;
      store_quads(out + static_cast<size_t>(unit) * rows + first, rows, units, v[0], v[1], v[2], v[3]);
    }
  }
}
#else
template <class Weights>
static void pack_rows(const float* x, int num_inputs, int rows, int num_units, void* packed) {
  float* out = static_cast<float*>(packed);
  for (int unit = 0; unit < num_units; unit++)
    for (int row = 0; row < rows; row++)
      out[static_cast<size_t>(unit) * rows + row] = unit < num_inputs ? x[static_cast<size_t>(row) * num_inputs + unit] : 0.f;
}
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
