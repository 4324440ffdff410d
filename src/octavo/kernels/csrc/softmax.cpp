// e^(x - max) / sum, row by row; the sum is taken in an order that the width alone decides.
#include "exp_lanes.hpp"
#include "ops.hpp"
#include "row_map.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

void softmax_row(const float* x, int width, float* out) {
  float most = x[0];
  for (int i = 1; i < width; i++) most = x[i] > most ? x[i] : most;
  F16 sum = zero();
  for (int i = 0; i < width; i += kLanes) {
    const int left = width - i;
    if (left >= kLanes) {
      const F16 power = exp_lanes(sub(load(x + i), set1(most)));
      store(out + i, power);
      sum = add(sum, power);
    } else {
      const F16 power = first_lanes(exp_lanes(sub(load_first(x + i, left), set1(most))), zero(), left);
      store_first(out + i, power, left);
      sum = add(sum, power);
    }
  }
  const F16 total = set1(reduce_add(sum));
  map_row(out, width, out, [=](F16 a) { return div(a, total); });
}

}  // namespace

void softmax(ThreadPool& pool, const float* x, int num_rows, int width, float* out) {
  auto row = [=](size_t r) { softmax_row(x + r * static_cast<size_t>(width), width, out + r * static_cast<size_t>(width)); };
  for_each_row(pool, num_rows, width, row);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
