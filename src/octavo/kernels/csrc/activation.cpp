// relu, gelu with erf, gelu with tanh, sigmoid: number by number.
#include "exp_lanes.hpp"
#include "ops.hpp"
#include "row_map.hpp"

namespace octavo {
namespace OCTAVO_ISA {

void activation(ThreadPool& pool, const float* x, Activation kind, int num_rows, int width, float* out) {
  auto row = [=](size_t r) {
    const float* from = x + r * static_cast<size_t>(width);
    float* to = out + r * static_cast<size_t>(width);
    switch (kind) {
      case Activation::relu: return map_row(from, width, to, [](F16 a) { return select_below(a, zero(), zero(), a); });
      case Activation::gelu: return map_row(from, width, to, [](F16 a) { return gelu_lanes(a); });
      case Activation::gelu_tanh: return map_row(from, width, to, [](F16 a) { return gelu_tanh_lanes(a); });
      case Activation::sigmoid: return map_row(from, width, to, [](F16 a) { return sigmoid_lanes(a); });
    }
  };
  for_each_row(pool, num_rows, width, row);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
