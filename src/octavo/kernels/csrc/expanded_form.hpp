// Tiles of small codes, made into bf16 tiles span by span (never a whole cache), and those of latents.
#pragma once
#include "kv_expand.hpp"
#include "latent_form.hpp"

namespace octavo {
namespace OCTAVO_ISA {

template <int kMaxDim>
#if OCTAVO_HAS_DPBF16
using Bf16Arithmetic = Bf16DotTiles<kMaxDim>;
#else
using Bf16Arithmetic = WidenedTiles<Bf16Words, kMaxDim>;
#endif

constexpr bool has_token_scales(KVFormat format) { return format == KVFormat::int8 || format == KVFormat::k8v4; }

// Pairs of K and V. The span that comes next is asked for tile by tile.
template <KVFormat kFormat>
struct ExpandedForm {
  using Tiles = Bf16Arithmetic<kMaxHeadDim>;
  static constexpr bool kPrepares = true, kScaled = has_token_scales(kFormat);
  static constexpr SpanMode kMode = kScaled ? SpanMode::scaled : SpanMode::plain;

  static void prepare(const KVLayerArgs& kv, const SpanRule& rule, const TileRange& range, const TileRange* next,
                      const PreparedTiles& room, SpanTiles& tiles) {
    const CodeLines codes(code_table(kFormat));
    const int64_t v_offset = tile_layout(kv).v_offset, codes_bytes = int64_t{kTileTokens} * rule.k_dim;
    const size_t tile_bytes = static_cast<size_t>(kTileTokens) * rule.k_dim * 2;
    for (int i = range.first; i < range.end; i++) {
      const int ahead = i - range.first;
      const uint8_t* k_next = next && ahead < next->count() ? next->at[next->first + ahead] : nullptr;
      const uint8_t *k = range.at[i], *v = k + v_offset, *v_next = k_next ? k_next + v_offset : nullptr;
      uint8_t *to_k = room.k + i * tile_bytes, *to_v = room.v + i * tile_bytes;
      expand_k<kScaled>(codes, k, rule.k_dim, k_next, to_k);
      if constexpr (kFormat == KVFormat::k8v4) expand_v4(v, rule.v_dim, v_next, to_v);
      else expand_v<kScaled>(codes, v, rule.v_dim, v_next, to_v);
      if constexpr (kScaled) expand_scales(k + codes_bytes, room.k_scales + i * kTileTokens);
      if constexpr (kFormat == KVFormat::int8) expand_scales(v + codes_bytes, room.v_scales + i * kTileTokens);
      tiles.k[i] = to_k;
      tiles.v[i] = to_v;
    }
    if (kScaled) tiles.k_scales = room.k_scales;
    if (kFormat == KVFormat::int8) tiles.v_scales = room.v_scales;
  }
};

// Latents: K as pairs have it; V is made from the expanded K, with the same scales.
template <KVFormat kFormat>
struct ExpandedLatentForm {
  using Tiles = Bf16Arithmetic<kMaxLatentDim>;
  static constexpr bool kPrepares = true, kScaled = has_token_scales(kFormat);
  static constexpr SpanMode kMode = kScaled ? SpanMode::scaled : SpanMode::plain;

  static void prepare(const KVLayerArgs&, const SpanRule& rule, const TileRange& range, const TileRange* next,
                      const PreparedTiles& room, SpanTiles& tiles) {
    const CodeLines codes(code_table(kFormat));
    for (int i = range.first; i < range.end; i++) {
      const int ahead = i - range.first;
      uint8_t* k = room.k + static_cast<size_t>(i) * kTileTokens * rule.k_dim * 2;
      uint8_t* v = room.v + static_cast<size_t>(i) * kTileTokens * rule.v_dim * 2;
      expand_k<kScaled>(codes, range.at[i], rule.k_dim, next && ahead < next->count() ? next->at[next->first + ahead] : nullptr, k);
      turn_tile_bf16(k, rule.v_dim, v);
      if (kScaled) expand_scales(range.at[i] + kTileTokens * rule.k_dim, room.k_scales + i * kTileTokens);
      tiles.k[i] = k;
      tiles.v[i] = v;
    }
    if (kScaled) tiles.k_scales = tiles.v_scales = room.k_scales;
  }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
