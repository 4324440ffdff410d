// out = x @ weights.T + bias, from panels of 16 outputs. Each output is one chain over the inputs in ascending order.
#include "ops.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct Work {
  LinearArgs args;
  int panels_per_piece;
};

void finish(const LinearArgs& args, int row, int panel, F16 sum) {
  const int n = args.weights->num_outputs, count = n - panel * kLanes < kLanes ? n - panel * kLanes : kLanes;
  float* out = args.out + static_cast<size_t>(row) * n + panel * kLanes;
  if (args.weights->bias) sum = add(sum, load(args.weights->bias + panel * kLanes));
  if (count == kLanes) {
    store(out, args.accumulate ? add(load(out), sum) : sum);
  } else {
    store_first(out, args.accumulate ? add(load_first(out, count), sum) : sum, count);
  }
}

void piece(void* context, int index, int) {
  const Work& work = *static_cast<const Work*>(context);
  const LinearWeights& w = *work.args.weights;
  const int num_panels = (w.num_outputs + kLanes - 1) / kLanes, k = w.num_inputs, pairs = (k + 1) / 2;
  for (int panel = index * work.panels_per_piece; panel < num_panels && panel < (index + 1) * work.panels_per_piece; panel++) {
    for (int row = 0; row < work.args.num_rows; row++) {
      const float* x = work.args.x + static_cast<size_t>(row) * k;
      F16 sum = zero();
      if (w.dtype == WeightsDtype::f32) {
        const float* p = static_cast<const float*>(w.weights) + static_cast<size_t>(panel) * k * kLanes;
        for (int i = 0; i < k; i++) sum = fma(load(p + static_cast<size_t>(i) * kLanes), set1(x[i]), sum);
      } else {
        const uint16_t* p = static_cast<const uint16_t*>(w.weights) + static_cast<size_t>(panel) * pairs * 2 * kLanes;
        for (int i = 0; i < pairs; i++) {
          const float x0 = x[2 * i], x1 = 2 * i + 1 < k ? x[2 * i + 1] : 0.f;
#if OCTAVO_HAS_DPBF16
          const __m512i xx = _mm512_set1_epi32(static_cast<int>(to_bf16(x0) | static_cast<uint32_t>(to_bf16(x1)) << 16));
          sum.v = _mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_loadu_si512(p + static_cast<size_t>(i) * 2 * kLanes), (__m512bh)xx);
#else
          sum = fma(low_bf16(p + static_cast<size_t>(i) * 2 * kLanes), set1(x0), sum);
          sum = fma(high_bf16(p + static_cast<size_t>(i) * 2 * kLanes), set1(x1), sum);
#endif
        }
      }
      finish(work.args, row, panel, sum);
    }
  }
}

}  // namespace

size_t linear_scratch_bytes(const LinearWeights&, int) { return 64; }

void linear(ThreadPool& pool, const LinearArgs& args) {
  Work work = {args, 4};
  const int num_panels = (args.weights->num_outputs + kLanes - 1) / kLanes;
  pool.run((num_panels + 3) / 4, piece, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
