// KV formats by name and by bytes (core/kv_bytes.py); what the bytes mean is in kv_formats/*.py.
#pragma once
#include <cstdint>
#include <cstring>

namespace octavo {

enum class KVFormat : int { f32, bf16, f16, fp8_e4m3, fp8_e5m2, int8, k8v4 };

constexpr int kTileTokens = 16;
constexpr const char* kKVFormatNames[] = {"f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4"};
constexpr int kNumKVFormats = 7;

static inline bool kv_format_of(const char* name, KVFormat* format) {
  for (int i = 0; i < kNumKVFormats; i++) {
    if (std::strcmp(name, kKVFormatNames[i]) != 0) continue;
    *format = static_cast<KVFormat>(i);
    return true;
  }
  return false;
}

static inline bool is_fp8(KVFormat format) { return format == KVFormat::fp8_e4m3 || format == KVFormat::fp8_e5m2; }

// head_dim must be a multiple of this
static inline int kv_dim_step(KVFormat format) { return format == KVFormat::k8v4 ? 32 : 16; }

static inline int64_t k_tile_bytes(KVFormat format, int head_dim) {
  const int64_t numbers = int64_t{kTileTokens} * head_dim;
  switch (format) {
    case KVFormat::f32: return numbers * 4;
    case KVFormat::bf16:
    case KVFormat::f16: return numbers * 2;
    case KVFormat::fp8_e4m3:
    case KVFormat::fp8_e5m2: return numbers;
    default: return numbers + 2 * kTileTokens;  // codes and a scale for each token
  }
}

static inline int64_t v_tile_bytes(KVFormat format, int head_dim) {
  if (format == KVFormat::k8v4) return int64_t{kTileTokens} * head_dim / 2 + 4 * kTileTokens;
  return k_tile_bytes(format, head_dim);
}

}  // namespace octavo
