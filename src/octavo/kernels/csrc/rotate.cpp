// Rope where nothing is written to the cache: dimensions first + j and first + j + half turn by the position's angle.
#include "ops.hpp"
#include "row_map.hpp"

namespace octavo {
namespace OCTAVO_ISA {

void rotate(ThreadPool& pool, const RotateArgs& args) {
  auto row = [&args](size_t r) {
    const size_t half = static_cast<size_t>(args.half), position = static_cast<size_t>(args.positions[r]);
    const float *cos = args.cos + position * half, *sin = args.sin + position * half;
    for (int head = 0; head < args.num_heads; head++) {
      float* x = args.heads + (r * static_cast<size_t>(args.num_heads) + static_cast<size_t>(head)) * static_cast<size_t>(args.head_dim) + args.first;
      for (size_t j = 0; j < half; j++) {
        const float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
      }
    }
  };
  for_each_row(pool, args.num_rows, args.num_heads * args.head_dim, row);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
