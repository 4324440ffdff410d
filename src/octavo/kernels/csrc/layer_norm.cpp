// (x - mean) / sqrt(variance + eps) * weight + bias. The sums of a row have an order that its width alone decides.
#include "ops.hpp"
#include "row_map.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <class Term>
float sum_of(const float* x, int width, Term&& term) {
  F16 sum = zero();
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) sum = add(sum, term(load(x + i)));
  if (i < width) sum = add(sum, first_lanes(term(load_first(x + i, width - i)), zero(), width - i));
  return reduce_add(sum);
}

void norm_row(const float* x, const float* weight, const float* bias, float eps, int width, float* out) {
  const F16 mean = set1(sum_of(x, width, [](F16 a) { return a; }) / static_cast<float>(width));
  const auto square = [=](F16 a) { return mul(sub(a, mean), sub(a, mean)); };
  const F16 root = set1(__builtin_sqrtf(sum_of(x, width, square) / static_cast<float>(width) + eps));
  for (int i = 0; i < width; i += kLanes) {
    const int left = width - i;
    if (left >= kLanes) {
      const F16 y = mul(div(sub(load(x + i), mean), root), load(weight + i));
      store(out + i, bias ? add(y, load(bias + i)) : y);
    } else {
      const F16 y = mul(div(sub(load_first(x + i, left), mean), root), load_first(weight + i, left));
      store_first(out + i, bias ? add(y, load_first(bias + i, left)) : y, left);
    }
  }
}

}  // namespace

void layer_norm(ThreadPool& pool, const float* x, const float* weight, const float* bias, float eps, int num_rows, int width,
                float* out) {
  auto row = [=](size_t r) {
    const size_t start = r * static_cast<size_t>(width);
    norm_row(x + start, weight, bias, eps, width, out + start);
  };
  for_each_row(pool, num_rows, width, row);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
