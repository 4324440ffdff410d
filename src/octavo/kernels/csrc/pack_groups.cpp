#include "pack_groups.hpp"

#include <atomic>
#include <cmath>
#include <cstring>

#include "half_float.hpp"
#include "weight_groups.hpp"

namespace octavo {
namespace {

constexpr int kLanes = 16;
constexpr int kPanelsPerPiece = 4;
constexpr float kLeastOrdinaryWeight = 0x1p-66f, kMostOrdinaryWeight = 0x1p66f;  // scales
constexpr float kLeast = 7.52316384526264e-37f;  // 2^-120: there, 127 / x is still finite

// One group of one output, before it is spread over its panel. scale and minimum: as many bytes as the dtype stores.
struct Group {
  uint8_t codes[kGroupInputs];
  uint8_t scale[4], minimum[2];
};

struct Pack {
  const void* from;  // f32, or blocks
  int num_outputs, num_inputs;
  WeightsDtype dtype;
  size_t block_bytes;  // 0: f32
  uint8_t* packed;
  std::atomic<bool>* ordinary;
};

void round_group(const float* x, int count, WeightsDtype dtype, Group& out) {
  float largest = 0.f, signed_largest = 0.f;
  bool finite = true;
  for (int i = 0; i < count; i++) {
    const float magnitude = std::fabs(x[i]);
    finite = finite && std::isfinite(x[i]);
    if (magnitude > largest) largest = magnitude, signed_largest = x[i];
  }
  const bool bytes = dtype == WeightsDtype::int8, live = finite && largest >= kLeast;
  const float inverse = !live ? 0.f : bytes ? 127.f / largest : -8.f / signed_largest;
  const float scale = !finite ? std::nanf("") : !live ? 0.f : bytes ? largest / 127.f : signed_largest / -8.f;
  const int offset = code_offset(dtype), most = bytes ? 127 : 7;
  for (int i = 0; i < kGroupInputs; i++) {
    const int code = live && i < count ? static_cast<int>(std::nearbyint(x[i] * inverse)) : 0;
    out.codes[i] = static_cast<uint8_t>((code > most ? most : code) + offset);
  }
  std::memcpy(out.scale, &scale, 4);
}

void take_block(const uint8_t* block, WeightsDtype dtype, Group& out) {
  const bool minimum = dtype == WeightsDtype::int4_min;
  const uint8_t* codes = block + (minimum ? 4 : 2);
  for (int i = 0; i < kGroupInputs; i++)
    out.codes[i] = dtype == WeightsDtype::int8 ? codes[i] ^ 0x80 : i < kGroupInputs / 2 ? codes[i] & 15 : codes[i - kGroupInputs / 2] >> 4;
  if (minimum) {
    std::memcpy(out.scale, block, 2);
    std::memcpy(out.minimum, block + 2, 2);
  } else {
    uint16_t half;
    std::memcpy(&half, block, 2);
    const float scale = from_f16(half);
    std::memcpy(out.scale, &scale, 4);
  }
}

float scale_of(const Group& group, WeightsDtype dtype) {
  float scale;
  uint16_t half;
  std::memcpy(&scale, group.scale, 4);
  std::memcpy(&half, group.scale, 2);
  return dtype == WeightsDtype::int4_min ? from_f16(half) : scale;
}

void place_group(const Group& group, WeightsDtype dtype, int lane, uint8_t* panel_group) {
  uint8_t* codes = panel_group + kGroupScaleBytes + lane * 4;
  if (dtype == WeightsDtype::int4_min) {
    std::memcpy(panel_group + lane * 2, group.scale, 2);
    std::memcpy(panel_group + kGroupScaleBytes / 2 + lane * 2, group.minimum, 2);
  } else {
    std::memcpy(panel_group + lane * 4, group.scale, 4);
  }
  if (dtype == WeightsDtype::int8) {
    for (int unit = 0; unit < kGroupUnits; unit++) std::memcpy(codes + unit * 64, group.codes + unit * 4, 4);
    return;
  }
  for (int i = 0; i < kGroupInputs / 2; i++)
    codes[i / 4 * 64 + i % 4] = static_cast<uint8_t>(group.codes[i] | group.codes[i + kGroupInputs / 2] << 4);
}

void pack_panel(const Pack& pack, int panel) {
  const int groups = num_groups(pack.num_inputs), first = panel * kLanes;
  const int count = pack.num_outputs - first < kLanes ? pack.num_outputs - first : kLanes;
  uint8_t* out = pack.packed + static_cast<size_t>(panel) * static_cast<size_t>(groups) * group_bytes(pack.dtype);
  for (int index = 0; index < groups; index++, out += group_bytes(pack.dtype)) {
    if (count < kLanes) std::memset(out, 0, group_bytes(pack.dtype));
    for (int lane = 0; lane < count; lane++) {
      const size_t row = static_cast<size_t>(first + lane);
      Group group;
      if (pack.block_bytes) {
        const size_t block = row * static_cast<size_t>(groups) + static_cast<size_t>(index);
        take_block(static_cast<const uint8_t*>(pack.from) + block * pack.block_bytes, pack.dtype, group);
      } else {
        const int start = index * kGroupInputs, left = pack.num_inputs - start;
        const float* x = static_cast<const float*>(pack.from) + row * static_cast<size_t>(pack.num_inputs) + start;
        round_group(x, left < kGroupInputs ? left : kGroupInputs, pack.dtype, group);
      }
      const float scale = std::fabs(scale_of(group, pack.dtype));
      if (scale == 0.f)
        std::memset(group.codes, code_offset(pack.dtype), kGroupInputs);
      else if (!(scale >= kLeastOrdinaryWeight && scale <= kMostOrdinaryWeight))
        pack.ordinary->store(false, std::memory_order_relaxed);
      place_group(group, pack.dtype, lane, out);
    }
  }
}

void pack_piece(void* context, int piece, int) {
  const Pack& pack = *static_cast<const Pack*>(context);
  const int num_panels = (pack.num_outputs + kLanes - 1) / kLanes;
  for (int panel = piece * kPanelsPerPiece; panel < num_panels && panel < (piece + 1) * kPanelsPerPiece; panel++)
    pack_panel(pack, panel);
}

bool run_pack(ThreadPool& pool, Pack& pack) {
  std::atomic<bool> ordinary{true};
  pack.ordinary = &ordinary;
  const int num_panels = (pack.num_outputs + kLanes - 1) / kLanes;
  pool.run((num_panels + kPanelsPerPiece - 1) / kPanelsPerPiece, pack_piece, &pack);
  return ordinary;
}

}  // namespace

size_t packed_groups_bytes(int num_outputs, int num_inputs, WeightsDtype dtype) {
  const size_t panels = (static_cast<size_t>(num_outputs) + kLanes - 1) / kLanes;
  return panels * static_cast<size_t>(num_groups(num_inputs)) * group_bytes(dtype);
}

bool pack_groups(ThreadPool& pool, const float* weight, int num_outputs, int num_inputs, WeightsDtype dtype, void* packed) {
  Pack pack = {weight, num_outputs, num_inputs, dtype, 0, static_cast<uint8_t*>(packed), nullptr};
  return run_pack(pool, pack);
}

bool pack_blocks(ThreadPool& pool, const uint8_t* blocks, int num_outputs, int num_inputs, BlockKind kind, void* packed) {
  Pack pack = {blocks, num_outputs, num_inputs, dtype_of_blocks(kind), block_bytes(kind), static_cast<uint8_t*>(packed), nullptr};
  return run_pack(pool, pack);
}

}  // namespace octavo
