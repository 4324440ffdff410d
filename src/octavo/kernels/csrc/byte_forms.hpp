// Pairs of K and V whose codes are computed with as they lie, in whole numbers: of a span, only scales are prepared, and K
// tiles of int4. Where bytes are not multiplied so, tiles are made of all of them (expanded_form.hpp).
#pragma once
#include "attention_byte_values.hpp"
#include "expanded_form.hpp"

namespace octavo {
namespace OCTAVO_ISA {

#if OCTAVO_DOTS_BYTES
// The scales of a V tile of 4 bits (16, then 16 minima), and what code 8 stands for.
static inline void set_middles(const uint8_t* scales, const PreparedTiles& room, int tile) {
  alignas(64) float minima[kTileTokens];
  float *to = room.v_scales + tile * kTileTokens, *middles = room.v_middles + tile * kTileTokens;
  expand_scales(scales, to);
  expand_scales(scales + 2 * kTileTokens, minima);
  store(middles, fma(set1(8.f), load(to), load(minima)));
}

// int8 and k8v4
template <KVFormat kFormat, int kQueryBytes>
struct ByteForm {
  static constexpr bool kHasV4 = kFormat == KVFormat::k8v4;
  using Tiles = std::conditional_t<kHasV4, K8V4Tiles<kMaxHeadDim>, Int8Tiles<kMaxHeadDim, kQueryBytes>>;
  static constexpr bool kPrepares = true, kPrefetches = false, kScaled = true, kReadsCodes = false, kTails = false;
  static constexpr bool kAsksForWholeTiles = kHasV4;  // K and V are of different sizes

  static void prepare(const KVLayerArgs& kv, const SpanRule& rule, const TileRange& range, const TileRange* next,
                      const PreparedTiles& room, SpanTiles& tiles) {
    const TileLayout layout = tile_layout(kv);
    const int k_scales = kTileTokens * rule.k_dim;
    for (int i = range.first; i < range.end; i++) {
      tiles.k[i] = range.at[i];
      tiles.v[i] = range.at[i] + layout.v_codes;
      expand_scales(range.at[i] + k_scales, room.k_scales + i * kTileTokens);
      if constexpr (kHasV4) set_middles(tiles.v[i] + rule.v_dim * 8, room, i);
      else expand_scales(range.at[i] + layout.v_offset, room.v_scales + i * kTileTokens);
    }
    tiles.k[range.end] = tiles.v[range.first];
    tiles.k[range.end + 1] = tiles.v[range.count() > 1 ? range.first + 1 : range.first];
    tiles.v[range.end] = next && next->count() ? next->at[next->first] : tiles.k[range.first];
    for (int i = next ? next->first : 0; !kHasV4 && next && i < next->end; i++) prefetch_line(next->at[i] + k_scales, 0);
    tiles.k_scales = room.k_scales;
    tiles.v_scales = room.v_scales;
    if (kHasV4) tiles.v_middles = room.v_middles;
  }
};

struct Int4Form {
  using Tiles = Int4Tiles<kMaxHeadDim>;
  static constexpr bool kPrepares = true, kPrefetches = true, kScaled = true, kReadsCodes = false, kTails = true;

  static void prepare(const KVLayerArgs& kv, const SpanRule& rule, const TileRange& range, const TileRange* next,
                      const PreparedTiles& room, SpanTiles& tiles) {
    const TileLayout layout = tile_layout(kv);
    const size_t tile_bytes = static_cast<size_t>(kTileTokens) * rule.k_dim * 2;
    const int v_lines = static_cast<int>(layout.bytes - layout.v_codes) / 64;
    for (int i = range.first; i < range.end; i++) {
      const int ahead = i - range.first;
      const uint8_t* k_next = next && ahead < next->count() ? next->at[next->first + ahead] : nullptr;
      uint8_t* to = room.k + i * tile_bytes;
      expand_k4(range.at[i], rule.k_dim, k_next, to);
      for (int line = 0; k_next && line < v_lines; line++) prefetch_line(k_next + layout.v_codes, line);
      tiles.k[i] = to;
      tiles.v[i] = range.at[i] + layout.v_codes;
      set_middles(tiles.v[i] + rule.v_dim * 8, room, i);
    }
    tiles.v[range.end] = tiles.v[range.first];
    tiles.v_scales = room.v_scales;
    tiles.v_middles = room.v_middles;
  }
};

using Int8Form = ByteForm<KVFormat::int8, 1>;
using FineInt8Form = ByteForm<KVFormat::int8, 2>;
using K8V4Form = ByteForm<KVFormat::k8v4, 1>;
#else
using Int8Form = ExpandedForm<KVFormat::int8>;
using FineInt8Form = Int8Form;
using K8V4Form = ExpandedForm<KVFormat::k8v4>;
using Int4Form = ExpandedForm<KVFormat::int4>;
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
