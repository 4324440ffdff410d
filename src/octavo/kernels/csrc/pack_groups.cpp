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
constexpr int kMaxMinimumBits = 15;   // and a sign
// Of groups times 2^bits of the minima: more would leave so few bits for what they are multiplied by that rounding it
// would be more than a third of what rounding activations to 8 bits is.
constexpr int64_t kMostWhole = 1 << 21;
constexpr int kMaxWholeGroups = 1024;  // so that rounding a row's factors cannot make sums of products overflow
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
  float* units;  // of minima, one an output
  std::atomic<bool>* ordinary;
  std::atomic<int>* minimum_bits;  // of the largest magnitude in its unit; more than kMaxMinimumBits: some have no unit
};

int num_panels_of(int num_outputs) { return (num_outputs + kLanes - 1) / kLanes; }

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

// Codes that mean nothing become zeros; their scale 1, so that products of scales are normal numbers.
void make_zeros(Group& group, WeightsDtype dtype) {
  const float one = 1.f;
  std::memset(group.codes, code_offset(dtype), kGroupInputs);
  std::memcpy(group.scale, &one, sizeof one);
  if (!has_minima(dtype)) return;
  const uint16_t half = to_f16(one);
  std::memcpy(group.scale, &half, sizeof half);
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

uint16_t read_half(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half;
}

// The power of 2 of the lowest bit that is set in a f16, which is finite and not 0.
int lowest_power(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = (half & 1023) | (exponent ? 1024 : 0);
  return (exponent ? exponent : 1) - 25 + __builtin_ctz(static_cast<unsigned>(fraction));
}

struct Unit {
  float size;
  int bits;  // of the largest magnitude in it
};

// The largest unit of which all minima of an output are multiples.
Unit unit_of_minima(const uint8_t* minima, int groups, size_t stride) {
  int lowest = 16;
  float largest = 0.f;
  for (int group = 0; group < groups; group++) {
    const uint16_t half = read_half(minima + static_cast<size_t>(group) * stride);
    const float size = std::fabs(from_f16(half));
    if (!std::isfinite(size)) return {1.f, kMaxMinimumBits + 1};
    if (size > 0.f) lowest = lowest < lowest_power(half) ? lowest : lowest_power(half);
    largest = size > largest ? size : largest;
  }
  const float unit = std::ldexp(1.f, lowest);
  return {unit, largest > 0.f ? std::ilogb(largest / unit) + 1 : 0};
}

// Packed minima of a panel, f16, into pairs of int16 in their units.
void make_minima_whole(const Pack& pack, int panel) {
  const int groups = num_groups(pack.num_inputs);
  const size_t stride = group_bytes(pack.dtype);
  const float* units = pack.units + static_cast<size_t>(panel) * kLanes;
  uint8_t* minima = pack.packed + static_cast<size_t>(panel) * static_cast<size_t>(groups) * stride + kGroupScaleBytes / 2;
  for (int group = 0; group < groups; group += 2, minima += 2 * stride) {
    int16_t pairs[kLanes][2];
    for (int lane = 0; lane < kLanes; lane++)
      for (int i = 0; i < 2; i++)
        pairs[lane][i] = static_cast<int16_t>(from_f16(read_half(minima + static_cast<size_t>(i) * stride + lane * 2)) / units[lane]);
    std::memcpy(minima, pairs, sizeof pairs / 2);
    std::memcpy(minima + stride, pairs[kLanes / 2], sizeof pairs / 2);
  }
}

void find_units(const Pack& pack, int panel) {
  const int groups = num_groups(pack.num_inputs);
  const size_t stride = group_bytes(pack.dtype);
  const uint8_t* minima = pack.packed + static_cast<size_t>(panel) * static_cast<size_t>(groups) * stride + kGroupScaleBytes / 2;
  for (int lane = 0; lane < kLanes; lane++) {
    const Unit unit = unit_of_minima(minima + lane * 2, groups, stride);
    pack.units[panel * kLanes + lane] = unit.size;
    int most = pack.minimum_bits->load(std::memory_order_relaxed);
    while (unit.bits > most && !pack.minimum_bits->compare_exchange_weak(most, unit.bits, std::memory_order_relaxed)) {}
  }
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
        make_zeros(group, pack.dtype);
      else if (!(scale >= kLeastOrdinaryWeight && scale <= kMostOrdinaryWeight))
        pack.ordinary->store(false, std::memory_order_relaxed);
      place_group(group, pack.dtype, lane, out);
    }
  }
}

struct Pieces {
  const Pack* pack;
  void (*make_panel)(const Pack& pack, int panel);
};

void make_piece(void* context, int piece, int) {
  const Pieces& pieces = *static_cast<const Pieces*>(context);
  const int num_panels = num_panels_of(pieces.pack->num_outputs), first = piece * kPanelsPerPiece;
  for (int panel = first; panel < num_panels && panel < first + kPanelsPerPiece; panel++) pieces.make_panel(*pieces.pack, panel);
}

void make_panels(ThreadPool& pool, const Pack& pack, void (*make_panel)(const Pack& pack, int panel)) {
  Pieces pieces = {&pack, make_panel};
  pool.run((num_panels_of(pack.num_outputs) + kPanelsPerPiece - 1) / kPanelsPerPiece, make_piece, &pieces);
}

void run_pack(ThreadPool& pool, const void* from, size_t block_bytes, LinearWeights& weights) {
  std::atomic<bool> ordinary{true};
  std::atomic<int> minimum_bits{0};
  uint8_t* packed = static_cast<uint8_t*>(const_cast<void*>(weights.weights));  // memory of who asked for it
  Pack pack = {from, weights.num_outputs, weights.num_inputs, weights.dtype, block_bytes, packed, nullptr, &ordinary, &minimum_bits};
  make_panels(pool, pack, pack_panel);
  weights.ordinary_scales = ordinary;
  if (!has_minima(weights.dtype)) return;
  const int groups = num_groups(weights.num_inputs);
  const size_t panel_bytes = static_cast<size_t>(groups) * group_bytes(weights.dtype);
  pack.units = reinterpret_cast<float*>(packed + static_cast<size_t>(num_panels_of(weights.num_outputs)) * panel_bytes);
  make_panels(pool, pack, find_units);
  const int bits = minimum_bits;
  if (groups % 2 || groups > kMaxWholeGroups || bits > kMaxMinimumBits || int64_t{groups} << bits > kMostWhole) return;
  make_panels(pool, pack, make_minima_whole);
  weights.dtype = WeightsDtype::int4_whole_min;
  weights.minimum_units = pack.units;
  weights.minimum_bits = bits;
}

}  // namespace

size_t packed_groups_bytes(int num_outputs, int num_inputs, WeightsDtype dtype) {
  const size_t units = has_minima(dtype) ? sizeof(float) * kLanes : 0;
  return static_cast<size_t>(num_panels_of(num_outputs)) * (static_cast<size_t>(num_groups(num_inputs)) * group_bytes(dtype) + units);
}

void pack_groups(ThreadPool& pool, const float* weight, LinearWeights& weights) { run_pack(pool, weight, 0, weights); }

void pack_blocks(ThreadPool& pool, const uint8_t* blocks, BlockKind kind, LinearWeights& weights) {
  run_pack(pool, blocks, block_bytes(kind), weights);
}

}  // namespace octavo
