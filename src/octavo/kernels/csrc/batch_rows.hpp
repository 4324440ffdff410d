// Rows of a step on the pool, a few to a piece, each with its sequence and position.
#pragma once
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kRowsPerPiece = 16, kFewRows = 64, kFewRowsPerPiece = 2;  // few rows are of different sequences: more work each

static inline int rows_per_piece_of(int num_rows) { return num_rows <= kFewRows ? kFewRowsPerPiece : kRowsPerPiece; }

// The last sequence that begins at or before a row; of several that begin there, the last has rows.
static inline int sequence_of(const BatchArgs& batch, int row) {
  int low = 0, high = batch.num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.query_start[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

template <class Args>
struct RowRange {
  const Args* args;
  int first, end;
};

// Calls `row_fn(args, sequence, row, position)` for every row of a piece.
template <class Args, void (*row_fn)(const Args&, int, int, int)>
static void run_rows(void* context, int piece, int) {
  const RowRange<Args>& range = *static_cast<const RowRange<Args>*>(context);
  const Args& args = *range.args;
  const int count = rows_per_piece_of(range.end - range.first), first = range.first + piece * count;
  const int end = first + count < range.end ? first + count : range.end;
  int sequence = sequence_of(args.batch, first);
  for (int row = first; row < end; row++) {
    while (row >= args.batch.query_start[sequence + 1]) sequence++;
    row_fn(args, sequence, row, args.batch.start_position[sequence] + row - args.batch.query_start[sequence]);
  }
}

template <class Args, void (*row_fn)(const Args&, int, int, int)>
static void for_each_row(ThreadPool& pool, const Args& args, int first, int num_rows) {
  const int count = rows_per_piece_of(num_rows);
  RowRange<Args> range = {&args, first, first + num_rows};
  pool.run((num_rows + count - 1) / count, run_rows<Args, row_fn>, &range);
}

template <class Args, void (*row_fn)(const Args&, int, int, int)>
static void for_each_row(ThreadPool& pool, const Args& args) {
  for_each_row<Args, row_fn>(pool, args, 0, args.num_tokens);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
