// Linear layers with grouped weights, of one instruction set.
#pragma once
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

size_t grouped_linear_scratch_bytes(const LinearWeights& weights, int num_rows);
void grouped_linear(ThreadPool& pool, const LinearArgs& args);

}  // namespace OCTAVO_ISA
}  // namespace octavo
