// Weights as they come ([num_outputs, num_inputs], f32) into the panels that the linear kernels read (kernel_table.hpp).
#pragma once
#include "kernel_table.hpp"

namespace octavo {

size_t packed_linear_bytes(int num_outputs, int num_inputs, WeightsDtype dtype);
// packed: packed_linear_bytes bytes. bf16 rounds to nearest even; a NaN stays a quiet NaN.
void pack_linear(ThreadPool& pool, const float* weight, int num_outputs, int num_inputs, WeightsDtype dtype, void* packed);

}  // namespace octavo
