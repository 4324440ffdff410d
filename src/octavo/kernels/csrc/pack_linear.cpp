#include "pack_linear.hpp"

#include <cstring>

namespace octavo {
namespace {

constexpr int kLanes = 16;
constexpr int kPanelsPerPiece = 4;

struct Pack {
  const float* weight;
  int num_outputs, num_inputs;
  WeightsDtype dtype;
  unsigned char* packed;
};

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

size_t panel_bytes(int num_inputs, WeightsDtype dtype) {
  const size_t inputs = static_cast<size_t>(num_inputs);
  return dtype == WeightsDtype::f32 ? inputs * kLanes * 4 : (inputs + 1) / 2 * kLanes * 4;
}

void pack_panel(const Pack& pack, int panel) {
  unsigned char* out = pack.packed + panel_bytes(pack.num_inputs, pack.dtype) * static_cast<size_t>(panel);
  const int first = panel * kLanes;
  const int count = pack.num_outputs - first < kLanes ? pack.num_outputs - first : kLanes;
  const size_t inputs = static_cast<size_t>(pack.num_inputs);
  if (count < kLanes || pack.num_inputs % 2) std::memset(out, 0, panel_bytes(pack.num_inputs, pack.dtype));
  // Sixteen inputs of sixteen rows at a time: reads follow the rows, writes stay inside a few lines.
  for (size_t from = 0; from < inputs; from += kLanes) {
    const size_t to = from + kLanes < inputs ? from + kLanes : inputs;
    for (int lane = 0; lane < count; lane++) {
      const float* row = pack.weight + static_cast<size_t>(first + lane) * inputs;
      const size_t column = static_cast<size_t>(lane);
      if (pack.dtype == WeightsDtype::f32) {
        float* target = reinterpret_cast<float*>(out);
        for (size_t k = from; k < to; k++) target[k * kLanes + column] = row[k];
      } else {
        uint16_t* target = reinterpret_cast<uint16_t*>(out);
        for (size_t k = from; k < to; k++) target[(k / 2 * kLanes + column) * 2 + k % 2] = to_bf16(row[k]);
      }
    }
  }
}

void pack_piece(void* context, int piece, int) {
  const Pack& pack = *static_cast<const Pack*>(context);
  const int num_panels = (pack.num_outputs + kLanes - 1) / kLanes;
  for (int panel = piece * kPanelsPerPiece; panel < num_panels && panel < (piece + 1) * kPanelsPerPiece; panel++)
    pack_panel(pack, panel);
}

}  // namespace

size_t packed_linear_bytes(int num_outputs, int num_inputs, WeightsDtype dtype) {
  return panel_bytes(num_inputs, dtype) * ((static_cast<size_t>(num_outputs) + kLanes - 1) / kLanes);
}

void pack_linear(ThreadPool& pool, const float* weight, int num_outputs, int num_inputs, WeightsDtype dtype, void* packed) {
  Pack pack = {weight, num_outputs, num_inputs, dtype, static_cast<unsigned char*>(packed)};
  const int num_panels = (num_outputs + kLanes - 1) / kLanes;
  pool.run((num_panels + kPanelsPerPiece - 1) / kPanelsPerPiece, pack_piece, &pack);
}

}  // namespace octavo
