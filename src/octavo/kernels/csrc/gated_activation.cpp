// act(gate) * up, where gate and up lie side by side. Without a choice of act, SiLU has an operation of its own (silu_mul.cpp).
#include "exp_lanes.hpp"
#include "ops.hpp"
#include "row_map.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// gate * sigmoid(1.702 gate) * (up + 1), gate at most the limit and up within it on both sides (gpt-oss)
OCTAVO_INLINE F16 clamped_swiglu_lanes(F16 gate, F16 up, float limit) {
  gate = select_below(set1(limit), gate, set1(limit), gate);
  up = select_below(set1(limit), up, set1(limit), up);
  up = select_below(up, set1(-limit), set1(-limit), up);
  return mul(mul(gate, sigmoid_lanes(mul(set1(1.702f), gate))), add(up, set1(1.f)));
}

}  // namespace

void gated_activation(ThreadPool& pool, const float* gate_up, Gate kind, float limit, int num_rows, int width, float* out) {
  auto row = [=](size_t r) {
    const float* gate = gate_up + r * 2 * static_cast<size_t>(width);
    const float* up = gate + width;
    float* to = out + r * static_cast<size_t>(width);
    switch (kind) {
      case Gate::gelu: return map_gated_row(gate, up, width, to, [](F16 g, F16 u) { return mul(gelu_lanes(g), u); });
      case Gate::gelu_tanh: return map_gated_row(gate, up, width, to, [](F16 g, F16 u) { return mul(gelu_tanh_lanes(g), u); });
      case Gate::clamped_swiglu:
        return map_gated_row(gate, up, width, to, [=](F16 g, F16 u) { return clamped_swiglu_lanes(g, u, limit); });
      case Gate::silu: return map_gated_row(gate, up, width, to, silu_mul_lanes);
    }
  };
  for_each_row(pool, num_rows, width, row);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
