// How weights in groups of 32 inputs lie in memory: int8, and 4 bits with or without a minimum.
//
// [panel of 16 outputs][group][64 bytes of scales | codes], outputs and inputs padded with zeros.
//   int8:     16 f32 scales; codes [8 units][16 outputs][4 inputs], a byte each, 128 more than the number they stand for.
//   int4:     16 f32 scales; codes [4][16][4], the low half of a byte for unit j, the high half for unit j + 4, 8 too much.
//   int4_min: 16 f16 scales, 16 f16 minima; codes as int4, none too much: weight = scale * code + minimum.
//   int4_whole_min: likewise, but minima are int16 times a unit of their output, a power of 2. Groups are an even number;
//   of two, the first has the pairs of minima of outputs 0 to 7, the second of 8 to 15. Behind all panels, the units (f32).
#pragma once
#include "kernel_table.hpp"

namespace octavo {

constexpr int kGroupInputs = 32;
constexpr int kGroupUnits = 8;  // of four inputs
constexpr size_t kGroupScaleBytes = 64;

constexpr bool has_groups(WeightsDtype dtype) { return dtype >= WeightsDtype::int8; }
constexpr int num_groups(int num_inputs) { return (num_inputs + kGroupInputs - 1) / kGroupInputs; }
constexpr size_t group_bytes(WeightsDtype dtype) { return kGroupScaleBytes + (dtype == WeightsDtype::int8 ? 512 : 256); }
constexpr bool has_minima(WeightsDtype dtype) { return dtype >= WeightsDtype::int4_min; }
// What a code is more than the number that it stands for.
constexpr int code_offset(WeightsDtype dtype) {
  return dtype == WeightsDtype::int8 ? 128 : dtype == WeightsDtype::int4 ? 8 : 0;
}
// The largest code of activations beside such weights: with 4 bits, a code of either can be added within a byte (crossed_products.hpp).
constexpr int most_code(WeightsDtype dtype) { return dtype == WeightsDtype::int8 ? 127 : 120; }

}  // namespace octavo
