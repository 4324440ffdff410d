// How a token's K and V become the bytes of its slot: the codecs of kv_formats, bit for bit. Two tokens of one tile may
// be written by different threads: every store touches bytes of its own token only.
#pragma once
#include "kv_tile.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// slot 0 .. 15 of a K tile
static inline void encode_k(KVFormat format, const float* k, int head_dim, int slot, uint8_t* tile) {
  if (format == KVFormat::f32) {
    float* to = reinterpret_cast<float*>(tile);  // [head_dim][16]
    for (int d = 0; d < head_dim; d++) to[d * kTileTokens + slot] = k[d];
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(tile) + slot * 2;  // [head_dim / 2][16][2]
  for (int d = 0; d < head_dim; d += 16) {
    uint16_t bits[16];
    for (int i = 0; i < 16; i++) bits[i] = to_bf16(k[d + i]);
    for (int i = 0; i < 16; i++) to[(d + i) / 2 * 2 * kTileTokens + i % 2] = bits[i];
  }
}

// slot 0 .. 15 of a V tile
static inline void encode_v(KVFormat format, const float* v, int head_dim, int slot, uint8_t* tile) {
  if (format == KVFormat::f32) {
    std::memcpy(tile + static_cast<size_t>(slot) * head_dim * 4, v, static_cast<size_t>(head_dim) * 4);  // [16][head_dim]
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(tile) + slot / 2 * head_dim * 2 + slot % 2;  // [8][head_dim][2]
  for (int d = 0; d < head_dim; d += 16) {
    uint16_t bits[16];
    for (int i = 0; i < 16; i++) bits[i] = to_bf16(v[d + i]);
    for (int i = 0; i < 16; i++) to[(d + i) * 2] = bits[i];
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
