// Weights into groups of 32 inputs (weight_groups.hpp): rounded from f32, or taken as they are from GGUF blocks.
#pragma once
#include "kernel_table.hpp"

namespace octavo {

// GGUF's blocks of 32 numbers, row by row: a f16 scale, q4_1 a f16 minimum, then int8 codes or 16 bytes of two codes each.
enum class BlockKind : int { q8_0 = 0, q4_0 = 1, q4_1 = 2 };

constexpr size_t block_bytes(BlockKind kind) { return kind == BlockKind::q8_0 ? 34 : kind == BlockKind::q4_0 ? 18 : 20; }
// What holds such blocks without rounding them again.
constexpr WeightsDtype dtype_of_blocks(BlockKind kind) {
  return kind == BlockKind::q8_0 ? WeightsDtype::int8 : kind == BlockKind::q4_0 ? WeightsDtype::int4 : WeightsDtype::int4_min;
}

size_t packed_groups_bytes(int num_outputs, int num_inputs, WeightsDtype dtype);
// dtype: int8 (scale = largest absolute value / 127) or int4 (the largest becomes -8, GGUF's rule for q4_0); nearest even.
// A group of less than 2^-120 is zeros; a group with a number that is not finite has a scale of NaN.
// `weights` has its shape, dtype and memory, and gets what becomes of them: whether all scales are ordinary (2^-66 to 2^66 in
// magnitude; one of 0 becomes 1, and its codes 0), and whether minima are whole numbers, where each is one of few enough
// bits (16 at most) in a power of 2 that its output's have in common, exactly.
void pack_groups(ThreadPool& pool, const float* weight, LinearWeights& weights);
void pack_blocks(ThreadPool& pool, const uint8_t* blocks, BlockKind kind, LinearWeights& weights);

}  // namespace octavo
