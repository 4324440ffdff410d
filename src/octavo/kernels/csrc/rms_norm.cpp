// x / sqrt(mean(x * x) + eps) * weight, stored or added to what is there. The squares of a row are summed in an order that its width alone decides.
#include "ops.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct RmsNorm {
  const float *x, *weight;
  float eps;
  int num_rows, width, rows;
  float* out;
  bool accumulate;
};

float sum_of_squares(const float* x, int width) {
  F16 s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  int i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    const F16 a = load(x + i), b = load(x + i + kLanes), c = load(x + i + 2 * kLanes), d = load(x + i + 3 * kLanes);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i < width; i += kLanes) {
    const F16 a = width - i < kLanes ? load_first(x + i, width - i) : load(x + i);
    s0 = fma(a, a, s0);
  }
  return reduce_add(add(add(s0, s1), add(s2, s3)));
}

void norm_row(const RmsNorm& work, int row) {
  const int width = work.width;
  const float* x = work.x + static_cast<size_t>(row) * static_cast<size_t>(width);
  float* out = work.out + static_cast<size_t>(row) * static_cast<size_t>(width);
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const F16 scale = set1(1.f / __builtin_sqrtf(mean + work.eps));
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F16 normed = mul(mul(load(x + i), scale), load(work.weight + i));
    store(out + i, work.accumulate ? add(load(out + i), normed) : normed);
  }
  if (const int rest = width - i) {
    const F16 normed = mul(mul(load_first(x + i, rest), scale), load_first(work.weight + i, rest));
    store_first(out + i, work.accumulate ? add(load_first(out + i, rest), normed) : normed, rest);
  }
}

void norm_piece(void* context, int piece, int) {
  const RmsNorm& work = *static_cast<const RmsNorm*>(context);
  for (int row = piece * work.rows; row < work.num_rows && row < (piece + 1) * work.rows; row++) norm_row(work, row);
}

}  // namespace

void rms_norm(ThreadPool& pool, const float* x, const float* weight, float eps, int num_rows, int width, float* out,
              bool accumulate) {
  RmsNorm work = {x, weight, eps, num_rows, width, rows_per_piece(num_rows, width), out, accumulate};
  pool.run(num_row_pieces(num_rows, work.rows), norm_piece, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
