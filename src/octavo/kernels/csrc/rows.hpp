// Row-wise work on the pool: in pieces of whole rows, or on the caller's thread where waking a worker would cost more.
#pragma once
#include <cstddef>

#include "thread_pool.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kInlineElements = 1 << 15;  // about 3 microseconds of row-wise work, less than a wake-up
constexpr int kPieceElements = 1 << 13;

static inline int rows_per_piece(int num_rows, int width) {
  if (static_cast<size_t>(num_rows) * static_cast<size_t>(width) <= static_cast<size_t>(kInlineElements)) return num_rows;
  return width >= kPieceElements ? 1 : kPieceElements / width;
}

static inline int num_row_pieces(int num_rows, int rows) { return rows ? (num_rows + rows - 1) / rows : 0; }

}  // namespace OCTAVO_ISA
}  // namespace octavo
