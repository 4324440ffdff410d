// Linear layers with grouped weights, of one instruction set.
#pragma once
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

size_t grouped_linear_scratch_bytes(const LinearWeights& weights, int num_rows, int num_threads);
void grouped_linear(ThreadPool& pool, const LinearArgs& args);
// Whether it can gate: tiles of these rows have panels of both halves, and a half is a whole number of panels.
bool grouped_linear_gates(const LinearWeights& weights, int num_rows);

}  // namespace OCTAVO_ISA
}  // namespace octavo
