#include "pack_linear.hpp"

#include <cstring>

namespace octavo {

namespace {

constexpr int kPanel = 16;

uint16_t round_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct PackJob {
  const float* weight;
  int num_outputs, num_inputs;
  WeightsDtype dtype;
  char* packed;
};

void pack_panel(void* context, int panel, int) {
  const PackJob& job = *static_cast<const PackJob*>(context);
  const int k = job.num_inputs, padded = (k + 1) / 2 * 2;
  for (int i = 0; i < kPanel; i++) {
    const int output = panel * kPanel + i;
    const float* row = output < job.num_outputs ? job.weight + static_cast<size_t>(output) * k : nullptr;
    if (job.dtype == WeightsDtype::f32) {
      float* to = reinterpret_cast<float*>(job.packed) + static_cast<size_t>(panel) * k * kPanel;
      for (int j = 0; j < k; j++) to[static_cast<size_t>(j) * kPanel + i] = row ? row[j] : 0.f;
    } else {
      uint16_t* to = reinterpret_cast<uint16_t*>(job.packed) + static_cast<size_t>(panel) * padded * kPanel;
      for (int j = 0; j < padded; j++)
        to[static_cast<size_t>(j / 2) * kPanel * 2 + i * 2 + j % 2] = row && j < k ? round_to_bf16(row[j]) : uint16_t{0};
    }
  }
}

}  // namespace

size_t packed_linear_bytes(int num_outputs, int num_inputs, WeightsDtype dtype) {
  const size_t panels = (static_cast<size_t>(num_outputs) + kPanel - 1) / kPanel;
  if (dtype == WeightsDtype::f32) return panels * kPanel * static_cast<size_t>(num_inputs) * 4;
  return panels * kPanel * ((static_cast<size_t>(num_inputs) + 1) / 2 * 2) * 2;
}

void pack_linear(ThreadPool& pool, const float* weight, int num_outputs, int num_inputs, WeightsDtype dtype, void* packed) {
  PackJob job{weight, num_outputs, num_inputs, dtype, static_cast<char*>(packed)};
  pool.run((num_outputs + kPanel - 1) / kPanel, pack_panel, &job);
}

}  // namespace octavo
