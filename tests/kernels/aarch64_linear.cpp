// A linear layer with grouped weights on the instruction sets of aarch64, for test_aarch64.py: reads int32 dtype, outputs, inputs,
// rows, then weights (f32; q4_1 blocks for int4_min) and f32 x; writes the outputs of each instruction set.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pack_groups.hpp"

namespace octavo {
#define LEVEL(isa)                                                                          \
  namespace isa {                                                                           \
  size_t linear_scratch_bytes(const LinearWeights& weights, int num_rows, int num_threads); \
  void linear(ThreadPool& pool, const LinearArgs& args);                                    \
  }
LEVEL(portable)
LEVEL(neon_dot)
}  // namespace octavo

using namespace octavo;

static void* aligned(std::vector<uint8_t>& bytes, size_t count) {
  bytes.resize(count + 64);
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
}

template <class Scratch, class Run>
static void run(ThreadPool& pool, const LinearWeights& weights, const std::vector<float>& x, int rows, Scratch scratch_bytes, Run linear) {
  std::vector<uint8_t> scratch;
  std::vector<float> out(static_cast<size_t>(rows) * weights.num_outputs);
  linear(pool, {&weights, x.data(), out.data(), rows, false, aligned(scratch, scratch_bytes(weights, rows, pool.num_threads())), false});
  fwrite(out.data(), 4, out.size(), stdout);
}

int main() {
  int32_t head[4];
  if (fread(head, 4, 4, stdin) != 4) return 1;
  const int outputs = head[1], inputs = head[2], rows = head[3];
  const WeightsDtype dtype = static_cast<WeightsDtype>(head[0]);
  const bool has_blocks = dtype == WeightsDtype::int4_min;
  const size_t numbers = static_cast<size_t>(outputs) * inputs;
  std::vector<uint8_t> w(has_blocks ? numbers / 32 * block_bytes(BlockKind::q4_1) : numbers * 4);
  std::vector<float> x(static_cast<size_t>(rows) * inputs);
  if (fread(w.data(), 1, w.size(), stdin) != w.size() || fread(x.data(), 4, x.size(), stdin) != x.size()) return 1;
  ThreadPool pool(2, 100);
  std::vector<uint8_t> bytes;
  void* packed = aligned(bytes, packed_groups_bytes(outputs, inputs, dtype));
  LinearWeights weights = {packed, nullptr, outputs, inputs, dtype};
  if (has_blocks) pack_blocks(pool, w.data(), BlockKind::q4_1, weights);
  else pack_groups(pool, reinterpret_cast<const float*>(w.data()), weights);
  run(pool, weights, x, rows, portable::linear_scratch_bytes, portable::linear);
  run(pool, weights, x, rows, neon_dot::linear_scratch_bytes, neon_dot::linear);
}
