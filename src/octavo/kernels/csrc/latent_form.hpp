// Latent tiles: a token's vector is its key and, as far as its first numbers go, its value. The tile lies as a K tile
// (kv_formats/layout.py); the V tile that attention multiplies is made from it once for all heads.
#pragma once
#include "attention_run.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// K tile [k_dim][16] -> V tile [16][v_dim], f32
static inline void turn_tile_f32(const uint8_t* k_tile, int v_dim, uint8_t* v_tile) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(k_tile);
  uint32_t* to = reinterpret_cast<uint32_t*>(v_tile);
  for (int d = 0; d < v_dim; d += 16)
    for (int token = 0; token < kTileTokens; token++)
      for (int i = 0; i < 16; i++) to[token * v_dim + d + i] = from[(d + i) * kTileTokens + token];
}

#if defined(__AVX512F__)
// Sixteen dimensions (8 lines of 16 tokens x 2 dimensions) at a time: words are paired by tokens inside each line, then
// three rounds of exchanges between lines turn "line by token pair" into "token pair by line".
struct TurnTables {
  alignas(64) int16_t pairs[32];
  alignas(64) int32_t rounds[3][2][16], last[16];
};
constexpr TurnTables make_turn_tables() {
  TurnTables t = {};
  for (int half = 0; half < 2; half++)
    for (int pair = 0; pair < 8; pair++)
      for (int e = 0; e < 2; e++) t.pairs[2 * (half * 8 + pair) + e] = static_cast<int16_t>(2 * (2 * pair + e) + half);
  for (int round = 0; round < 3; round++)
    for (int bit = 0; bit < 2; bit++)
      for (int lane = 0; lane < 16; lane++)
        t.rounds[round][bit][lane] = ((lane & ~(1 << round)) | (bit << round)) + ((lane >> round & 1) ? 16 : 0);
  for (int lane = 0; lane < 16; lane++) t.last[lane] = (lane & 1) * 8 + (lane >> 1);
  return t;
}
static constexpr TurnTables kTurn = make_turn_tables();

// K tile [k_dim / 2][16][2] -> V tile [8][v_dim][2], 16 bits a number
static inline void turn_tile_bf16(const uint8_t* k_tile, int v_dim, uint8_t* v_tile) {
  const __m512i pairs = _mm512_load_si512(kTurn.pairs), last = _mm512_load_si512(kTurn.last);
  for (int d = 0; d < v_dim; d += 16) {
    __m512i line[8];
    for (int i = 0; i < 8; i++)
      line[i] = _mm512_maskz_permutexvar_epi16(0xffffffffu, pairs, _mm512_loadu_si512(k_tile + (d / 2 + i) * 64));
    for (int round = 0; round < 3; round++) {
      const __m512i low = _mm512_load_si512(kTurn.rounds[round][0]), high = _mm512_load_si512(kTurn.rounds[round][1]);
      for (int i = 0; i < 8; i++) {
        if (i >> round & 1) continue;
        const __m512i a = line[i], b = line[i | 1 << round];
        line[i] = _mm512_permutex2var_epi32(a, low, b);
        line[i | 1 << round] = _mm512_permutex2var_epi32(a, high, b);
      }
    }
    for (int i = 0; i < 8; i++)
      _mm512_storeu_si512(v_tile + (static_cast<size_t>(i) * v_dim + d) * 4,
                          _mm512_maskz_permutexvar_epi32(0xffff, last, line[i]));
  }
}
#else
// K tile [k_dim / 2][16][2] -> V tile [8][v_dim][2], 16 bits a number
static inline void turn_tile_bf16(const uint8_t* k_tile, int v_dim, uint8_t* v_tile) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(k_tile);
  uint32_t* to = reinterpret_cast<uint32_t*>(v_tile);
  for (int d = 0; d < v_dim; d += 2) {
    for (int pair = 0; pair < kTileTokens / 2; pair++) {
      const uint32_t a = from[d * 8 + 2 * pair], b = from[d * 8 + 2 * pair + 1];
      to[pair * v_dim + d] = (a & 0xffffu) | (b << 16);
      to[pair * v_dim + d + 1] = (a >> 16) | (b & 0xffff0000u);
    }
  }
}
#endif

// Tiles of latents in f32, bf16 or f16.
template <class Arithmetic>
struct LatentForm {
  using Tiles = Arithmetic;
  static constexpr bool kPrepares = true, kPrefetches = false, kReadsCodes = false, kScaled = false, kTails = false, kAsksForWholeTiles = true;

  static void prepare(const KVLayerArgs&, const SpanRule& rule, const TileRange& range, const TileRange*,
                      const PreparedTiles& room, SpanTiles& tiles) {
    for (int i = range.first; i < range.end; i++) {
      uint8_t* v = room.v + static_cast<size_t>(i) * kTileTokens * rule.v_dim * Tiles::kItemBytes;
      if (Tiles::kItemBytes == 4) turn_tile_f32(range.at[i], rule.v_dim, v);
      else turn_tile_bf16(range.at[i], rule.v_dim, v);
      tiles.k[i] = range.at[i];
      tiles.v[i] = v;
    }
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
