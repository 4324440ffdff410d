// The register tiles of the linear layers: R rows by P panels of 16 outputs. Whatever the tile, an output is one chain of
// multiply-adds over the inputs in ascending order, so all tiles give the same bits.
#pragma once
#include "kernel_table.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// The largest tiles that the registers hold.
#if defined(__AVX512F__)
constexpr int kMaxTileRows = 12;
constexpr int max_tile_panels(int rows) { return rows <= 6 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kMaxTileRows = 6;
constexpr int max_tile_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#elif defined(__aarch64__)
constexpr int kMaxTileRows = 6;
constexpr int max_tile_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kMaxTileRows = 2;
constexpr int max_tile_panels(int rows) { return rows == 1 ? 2 : 1; }
#endif

// One step of a tile reads 64 bytes of each panel: sixteen inputs' worth of f32 weights, or sixteen pairs of bf16.
constexpr size_t kStepBytes = 64;

struct Tile {
  const uint8_t* weights;  // the first panel, at the first step
  size_t panel_bytes;
  const uint8_t* x;  // [steps][rows] in the format's packing of x
  int steps;
  bool resume;   // sums hold what earlier steps gave
  float* sums;   // [rows][panels][16]
  const uint8_t* prefetch;  // what is wanted after this tile ...
  size_t prefetch_step;     // ... and how far to go in it with each step
};

struct F32Weights {
  static constexpr int kXBytes = 4;  // of packed x, for a row and a step
  static constexpr int kInputs = 1;  // of a row, in a step
  template <int R, int P>
  static inline __attribute__((always_inline)) void step(F16 (&sum)[R][P], const uint8_t* w, size_t panel_bytes, const uint8_t* x) {
    F16 weight[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) weight[p] = load(reinterpret_cast<const float*>(w + static_cast<size_t>(p) * panel_bytes));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const F16 value = set1(reinterpret_cast<const float*>(x)[r]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sum[r][p] = fma(weight[p], value, sum[r][p]);
    }
  }
};

#if OCTAVO_HAS_DPBF16
// x is rounded to bf16, and the instruction multiplies pairs.
struct Bf16Weights {
  static constexpr int kXBytes = 4;
  static constexpr int kInputs = 2;
  template <int R, int P>
  static inline __attribute__((always_inline)) void step(F16 (&sum)[R][P], const uint8_t* w, size_t panel_bytes, const uint8_t* x) {
    __m512i weight[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) weight[p] = _mm512_loadu_si512(w + static_cast<size_t>(p) * panel_bytes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512i value = _mm512_set1_epi32(reinterpret_cast<const int32_t*>(x)[r]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sum[r][p].v = _mm512_dpbf16_ps(sum[r][p].v, (__m512bh)weight[p], (__m512bh)value);
    }
  }
};
#else
// Weights are widened, x stays as it is.
struct Bf16Weights {
  static constexpr int kXBytes = 8;
  static constexpr int kInputs = 2;
  template <int R, int P>
  static inline __attribute__((always_inline)) void step(F16 (&sum)[R][P], const uint8_t* w, size_t panel_bytes, const uint8_t* x) {
    const float* value = reinterpret_cast<const float*>(x);
    half<R, P>(sum, w, panel_bytes, value, low_bf16);
    half<R, P>(sum, w, panel_bytes, value + R, high_bf16);
  }

 private:
  template <int R, int P, class Widen>
  static inline __attribute__((always_inline)) void half(F16 (&sum)[R][P], const uint8_t* w, size_t panel_bytes, const float* x,
                                                         Widen widen) {
    F16 weight[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) weight[p] = widen(w + static_cast<size_t>(p) * panel_bytes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const F16 value = set1(x[r]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sum[r][p] = fma(weight[p], value, sum[r][p]);
    }
  }
};
#endif

// kStreamed: the panels are read once, by this tile alone, and the next panels are fetched at the same rate. Otherwise
// several tiles read them, and each fetches its share of what comes next.
template <class Weights, int R, int P, bool kStreamed>
static void run_tile(const Tile& tile) {
  F16 sum[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) sum[r][p] = tile.resume ? load(tile.sums + (r * P + p) * kLanes) : zero();
  }
  const uint8_t *w = tile.weights, *x = tile.x, *next = tile.prefetch;
  const size_t panel_bytes = tile.panel_bytes, prefetch_step = tile.prefetch_step;
  for (int i = 0; i < tile.steps; i++) {
    if (kStreamed) {
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) __builtin_prefetch(next + static_cast<size_t>(p) * panel_bytes, 0, 2);
      next += kStepBytes;
    } else {
      __builtin_prefetch(next, 0, 2);  // the first-level cache has other things to hold
      next += prefetch_step;
    }
    Weights::template step<R, P>(sum, w, panel_bytes, x);
    w += kStepBytes;
    x += R * Weights::kXBytes;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) store(tile.sums + (r * P + p) * kLanes, sum[r][p]);
  }
}

using TileFn = void (*)(const Tile&);

template <class Weights, int R, bool kStreamed>
static TileFn tile_of_rows(int panels) {
  if constexpr (max_tile_panels(R) >= 4) {
    if (panels == 4) return run_tile<Weights, R, 4, kStreamed>;
  }
  if constexpr (max_tile_panels(R) >= 2) {
    if (panels == 2) return run_tile<Weights, R, 2, kStreamed>;
  }
  return run_tile<Weights, R, 1, kStreamed>;
}

// The tile of `rows` rows (1 to kMaxTileRows) and `panels` panels (1, 2 or 4, at most max_tile_panels(rows)).
template <class Weights, bool kStreamed, int R = kMaxTileRows>
static TileFn find_tile(int rows, int panels) {
  if constexpr (R > 1) {
    if (rows < R) return find_tile<Weights, kStreamed, R - 1>(rows, panels);
  }
  return tile_of_rows<Weights, R, kStreamed>(panels);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
