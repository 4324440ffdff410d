// KV formats by name and by bytes (core/kv_bytes.py); what the bytes mean is in kv_formats/*.py.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo {

enum class KVFormat : int { f32, bf16, f16, fp8_e4m3, fp8_e5m2, int8, k8v4, int4 };

constexpr int kTileTokens = 16;
constexpr const char* kKVFormatNames[] = {"f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int4"};
constexpr int kNumKVFormats = 8;

static inline bool kv_format_of(const char* name, KVFormat* format) {
  for (int i = 0; i < kNumKVFormats; i++) {
    if (std::strcmp(name, kKVFormatNames[i]) != 0) continue;
    *format = static_cast<KVFormat>(i);
    return true;
  }
  return false;
}

static inline bool is_fp8(KVFormat format) { return format == KVFormat::fp8_e4m3 || format == KVFormat::fp8_e5m2; }

// K is quantised by whole tiles, and waits for its tile to fill as bf16 in a tail (kv_formats/layout.py).
constexpr bool has_tail(KVFormat format) { return format == KVFormat::int4; }

static inline bool has_v4(KVFormat format) { return format == KVFormat::k8v4 || format == KVFormat::int4; }

// head_dim must be a multiple of this
static inline int kv_dim_step(KVFormat format) { return has_v4(format) ? 32 : 16; }

static inline int64_t k_tile_bytes(KVFormat format, int head_dim) {
  const int64_t numbers = int64_t{kTileTokens} * head_dim;
  switch (format) {
    case KVFormat::f32: return numbers * 4;
    case KVFormat::bf16:
    case KVFormat::f16: return numbers * 2;
    case KVFormat::fp8_e4m3:
    case KVFormat::fp8_e5m2: return numbers;
    case KVFormat::int4: return numbers / 2 + int64_t{4} * head_dim;  // codes, and scale and minimum for each channel
    default: return numbers + 2 * kTileTokens;  // codes and a scale for each token
  }
}

// In int8, V's scales lie before its codes and so beside those of K: the codes of both, in a pair, begin at a line of memory.
static constexpr int64_t v_codes_offset(KVFormat format) { return format == KVFormat::int8 ? 2 * kTileTokens : 0; }

static inline int64_t v_tile_bytes(KVFormat format, int head_dim) {
  if (has_v4(format)) return int64_t{kTileTokens} * head_dim / 2 + 4 * kTileTokens;
  return k_tile_bytes(format, head_dim);
}

}  // namespace octavo
