// Where the tiles of a layer lie: 16 tokens of one KV head, [K tile | V tile] (kv_formats/layout.py); of a latent layer
// [K tile] alone.
#pragma once
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

struct TileLayout {
  int64_t v_offset, v_codes, bytes;  // where the V tile begins, and where its numbers do
};

static inline TileLayout tile_layout(const KVLayerArgs& kv) {
  const int64_t k_bytes = k_tile_bytes(kv.format, kv.head_dim);
  return {k_bytes, k_bytes + v_codes_offset(kv.format), k_bytes + (kv.is_latent ? 0 : v_tile_bytes(kv.format, kv.head_dim))};
}

// First tile of one KV head in a block; the block's other tiles of this head follow each other.
static inline uint8_t* head_tiles(const KVLayerArgs& kv, const TileLayout& layout, int32_t block_id, int kv_head) {
  const int64_t tile = static_cast<int64_t>(kv_head) * (kv.block_size / kTileTokens);
  return kv.pool + block_id * kv.block_bytes + kv.layer_offset + tile * layout.bytes;
}

// The tile of a position of a sequence.
static inline uint8_t* tile_at(const KVLayerArgs& kv, const TileLayout& layout, const BatchArgs& batch, int sequence,
                               int position, int kv_head) {
  const int32_t* table = batch.block_table + static_cast<size_t>(sequence) * batch.max_blocks;
  const int inside = position % kv.block_size / kTileTokens;
  return head_tiles(kv, layout, table[position / kv.block_size], kv_head) + inside * layout.bytes;
}

// K of a position's own tile, in bf16, of formats that have a tail.
static inline uint8_t* tail_tile_at(const KVLayerArgs& kv, const BatchArgs& batch, int sequence, int position, int kv_head) {
  const int32_t block_id = batch.tail_table[static_cast<size_t>(sequence) * batch.max_blocks + position / kv.block_size];
  const int64_t tile = static_cast<int64_t>(kv_head) * (kv.block_size / kTileTokens) + position % kv.block_size / kTileTokens;
  return kv.pool + block_id * kv.block_bytes + kv.tail_offset + tile * k_tile_bytes(KVFormat::bf16, kv.head_dim);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
