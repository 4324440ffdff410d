// Where the tiles of a layer lie: 16 tokens of one KV head, [K tile | V tile] (kv_formats/layout.py).
#pragma once
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kTileTokens = 16;

static inline int kv_item_bytes(KVFormat format) { return format == KVFormat::f32 ? 4 : 2; }
// Bytes of a K tile, and of a V tile.
static inline int64_t half_tile_bytes(const KVLayerArgs& kv) {
  return static_cast<int64_t>(kTileTokens) * kv.head_dim * kv_item_bytes(kv.format);
}
// First tile of one KV head in a block; the block's other tiles of this head follow, 2 * half_tile_bytes apart.
static inline uint8_t* head_tiles(const KVLayerArgs& kv, int32_t block_id, int kv_head) {
  const int64_t tile = static_cast<int64_t>(kv_head) * (kv.block_size / kTileTokens);
  return kv.pool + block_id * kv.block_bytes + kv.layer_offset + tile * 2 * half_tile_bytes(kv);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
