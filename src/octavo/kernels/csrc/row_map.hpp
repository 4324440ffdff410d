// Numbers that become others one by one: whole rows of them, in pieces on the pool.
#pragma once
#include <cstddef>

#include "rows.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

template <class Lanes>
static void map_row(const float* x, int width, float* out, Lanes&& lanes) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, lanes(load(x + i)));
  if (i < width) store_first(out + i, lanes(load_first(x + i, width - i)), width - i);
}

template <class Lanes>
static void map_gated_row(const float* gate, const float* up, int width, float* out, Lanes&& lanes) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, lanes(load(gate + i), load(up + i)));
  const int left = width - i;
  if (left) store_first(out + i, lanes(load_first(gate + i, left), load_first(up + i, left)), left);
}

// Calls row(r) for every row, on as many threads as that is worth.
template <class Row>
static void for_each_row(ThreadPool& pool, int num_rows, int width, Row& row) {
  struct Work {
    Row* row;
    int num_rows, rows;
  } work = {&row, num_rows, rows_per_piece(num_rows, width)};
  const auto piece = [](void* context, int index, int) {
    const Work& w = *static_cast<const Work*>(context);
    for (int r = index * w.rows; r < w.num_rows && r < (index + 1) * w.rows; r++) (*w.row)(static_cast<size_t>(r));
  };
  pool.run(num_row_pieces(num_rows, work.rows), piece, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
