// Where a finished sum of a linear layer goes: bias, then the output, or what is in it already.
#pragma once
#include "kernel_table.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

static inline void finish_row(const LinearArgs& args, int row, int panel, F16 sum) {
  const int outputs = args.weights->num_outputs, column = panel * kLanes, count = outputs - column;
  float* out = args.out + static_cast<size_t>(row) * outputs + column;
  if (args.weights->bias) sum = add(sum, load(args.weights->bias + column));
  if (count >= kLanes) {
    store(out, args.accumulate ? add(load(out), sum) : sum);
  } else {
    store_first(out, args.accumulate ? add(load_first(out, count), sum) : sum, count);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
