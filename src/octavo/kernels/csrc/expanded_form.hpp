// Tiles of small codes, made into bf16 tiles span by span (never a whole cache), and those of latents.
#pragma once
#include "attention_codes.hpp"
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

// The scales of a span's tokens, tile by tile. Of k8v4, V comes with its scales multiplied in.
template <KVFormat kFormat>
static void set_scales(const TileLayout& layout, const TileRange& range, int head_dim, const PreparedTiles& room, SpanTiles& tiles) {
  for (int i = range.first; i < range.end; i++) {
    expand_scales(range.at[i] + kTileTokens * head_dim, room.k_scales + i * kTileTokens);
    if (kFormat == KVFormat::int8) expand_scales(range.at[i] + layout.v_offset, room.v_scales + i * kTileTokens);
  }
  tiles.k_scales = room.k_scales;
  if (kFormat == KVFormat::int8) tiles.v_scales = room.v_scales;
}

// Pairs of K and V. The span that comes next is asked for tile by tile.
template <KVFormat kFormat>
struct ExpandedForm {
  using Tiles = Bf16Arithmetic<kMaxHeadDim>;
  static constexpr bool kPrepares = true, kPrefetches = true, kScaled = has_token_scales(kFormat), kTails = has_tail(kFormat);
  static constexpr bool kAsksForWholeTiles = false;
#if OCTAVO_READS_CODES
  static constexpr bool kReadsCodes = !kScaled && !kTails;  // fp8
  using CodeTiles = CodeDotTiles<kMaxHeadDim, kFormat>;

  static void read_codes(const KVLayerArgs& kv, const TileRange& range, SpanTiles& tiles) {
    const TileLayout layout = tile_layout(kv);
    for (int i = range.first; i < range.end; i++) {
      tiles.k[i] = range.at[i];
      tiles.v[i] = range.at[i] + layout.v_codes;
    }
  }
#else
  static constexpr bool kReadsCodes = false;
#endif

  static void prepare(const KVLayerArgs& kv, const SpanRule& rule, const TileRange& range, const TileRange* next,
                      const PreparedTiles& room, SpanTiles& tiles) {
    const CodeLines<kScaled> codes(code_table(kFormat));
    const TileLayout layout = tile_layout(kv);
    const size_t tile_bytes = static_cast<size_t>(kTileTokens) * rule.k_dim * 2;
    for (int i = range.first; i < range.end; i++) {
      const int ahead = i - range.first;
      const uint8_t* k_next = next && ahead < next->count() ? next->at[next->first + ahead] : nullptr;
      const uint8_t *k = range.at[i], *v = k + layout.v_codes, *v_next = k_next ? k_next + layout.v_codes : nullptr;
      if (kFormat == KVFormat::int8 && k_next) prefetch_line(k_next + kTileTokens * rule.k_dim, 0);  // scales
      uint8_t *to_k = room.k + i * tile_bytes, *to_v = room.v + i * tile_bytes;
      if constexpr (kFormat == KVFormat::int4) expand_k4(k, rule.k_dim, k_next, to_k);
      else expand_k(codes, k, rule.k_dim, k_next, to_k);
      if constexpr (kFormat == KVFormat::k8v4 || kFormat == KVFormat::int4) expand_v4(v, rule.v_dim, v_next, to_v);
      else expand_v(codes, v, rule.v_dim, v_next, to_v);
      tiles.k[i] = to_k;
      tiles.v[i] = to_v;
    }
    if constexpr (kScaled) set_scales<kFormat>(layout, range, rule.k_dim, room, tiles);
  }
};

// Latents: K as pairs have it; V is made from the expanded K, with the same scales.
template <KVFormat kFormat>
struct ExpandedLatentForm {
  using Tiles = Bf16Arithmetic<kMaxLatentDim>;
  static constexpr bool kPrepares = true, kPrefetches = true, kScaled = has_token_scales(kFormat), kReadsCodes = false,
                        kTails = false;

  static void prepare(const KVLayerArgs&, const SpanRule& rule, const TileRange& range, const TileRange* next,
                      const PreparedTiles& room, SpanTiles& tiles) {
    const CodeLines<kScaled> codes(code_table(kFormat));
    for (int i = range.first; i < range.end; i++) {
      const int ahead = i - range.first;
      uint8_t* k = room.k + static_cast<size_t>(i) * kTileTokens * rule.k_dim * 2;
      uint8_t* v = room.v + static_cast<size_t>(i) * kTileTokens * rule.v_dim * 2;
      expand_k(codes, range.at[i], rule.k_dim, next && ahead < next->count() ? next->at[next->first + ahead] : nullptr, k);
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
