// gate * sigmoid(gate) * up, row by row.
#include "exp_lanes.hpp"
#include "ops.hpp"
#include "rows.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

struct SiluMul {
  const float* gate_up;
  int num_rows, width, rows;
  float* out;
};

void silu_row(const float* gate, const float* up, int width, float* out) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, silu_mul_lanes(load(gate + i), load(up + i)));
  const int left = width - i;
  if (left) store_first(out + i, silu_mul_lanes(load_first(gate + i, left), load_first(up + i, left)), left);
}

void silu_piece(void* context, int piece, int) {
  const SiluMul& work = *static_cast<const SiluMul*>(context);
  const size_t width = static_cast<size_t>(work.width);
  for (int row = piece * work.rows; row < work.num_rows && row < (piece + 1) * work.rows; row++) {
    const float* gate = work.gate_up + static_cast<size_t>(row) * 2 * width;
    silu_row(gate, gate + width, work.width, work.out + static_cast<size_t>(row) * width);
  }
}

}  // namespace

void silu_mul(ThreadPool& pool, const float* gate_up, int num_rows, int width, float* out) {
  SiluMul work = {gate_up, num_rows, width, rows_per_piece(num_rows, width), out};
  pool.run(num_row_pieces(num_rows, work.rows), silu_piece, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
