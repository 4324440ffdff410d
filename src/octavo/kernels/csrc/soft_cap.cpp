// cap * tanh(x / cap): large numbers bend towards the cap (Gemma 2).
#include "exp_lanes.hpp"
#include "ops.hpp"
#include "row_map.hpp"

namespace octavo {
namespace OCTAVO_ISA {

void soft_cap(ThreadPool& pool, const float* x, float cap, int num_rows, int width, float* out) {
  auto row = [=](size_t r) {
    const size_t start = r * static_cast<size_t>(width);
    map_row(x + start, width, out + start, [=](F16 a) { return mul(tanh_lanes(div(a, set1(cap))), set1(cap)); });
  };
  for_each_row(pool, num_rows, width, row);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
