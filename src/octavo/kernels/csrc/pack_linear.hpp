// Packing of weight matrices into the panels that the kernels read. Not tied to an instruction set.
#pragma once
#include <cstddef>

#include "kernel_table.hpp"

namespace octavo {

size_t packed_linear_bytes(int num_outputs, int num_inputs, WeightsDtype dtype);
// weight [num_outputs, num_inputs] -> panels (kernel_table.hpp); padding is zero.
void pack_linear(ThreadPool& pool, const float* weight, int num_outputs, int num_inputs, WeightsDtype dtype, void* packed);

}  // namespace octavo
