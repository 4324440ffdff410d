// Rows through matrices and gated MLPs, with their norms: which thread does what, and in what memory.
//
// Rows are shared out to the threads in blocks, each of which goes through everything on one thread: no thread waits for
// another between two steps, and what lies between them stays in the second-level cache. Where they are few, the threads
// share out the weights instead. Rows are computed alone, so neither changes a bit.
#pragma once
#include <vector>

#include "binding.hpp"

namespace octavo {

struct RowWork {
  const float* x;     // [num_rows, inputs of first]
  float* out;         // [num_rows, outputs of first, or of second]; null: `then` reads each block of it, and nobody later
  const float* norm;  // RMS norm of x before; null: none
  float eps;
  const LinearWeights *first, *second;  // second: of an MLP, behind the gated activation; null: none
  int num_rows;
  bool accumulate;
  // RMS norm of what the last matrix gives, before it is added to out (with `accumulate`); null: none.
  const float* out_norm = nullptr;
  Gate gate = Gate::silu;
  // What happens before rows [first, first + count) of out are made, and with them while they are in the caches of who made
  // them; null: nothing.
  void (*before)(const void* context, ThreadPool& pool, int first, int count) = nullptr;
  void (*then)(const void* context, ThreadPool& pool, int first, int count, const float* made) = nullptr;
  const void* context = nullptr;
};

class RowRunner {
 public:
  explicit RowRunner(ThreadPool& pool) : pool_(pool), spaces_(static_cast<size_t>(pool.num_threads())) {}

  void run(const KernelTable& table, const RowWork& work) { run(table, &work, 1); }

  // `count` works of the same rows, one after another: of the works before it, each reads only the rows that it computes.
  void run(const KernelTable& table, const RowWork* works, int count) {
    const int num_rows = works->num_rows;
    if (!are_shared(num_rows)) {
      for (int i = 0; i < count; i++) run_together(table, works[i]);
      return;
    }
    // as many blocks for each thread, as even as can be: none waits long for a last one
    const int threads = pool_.num_threads(), blocks = divide_up(divide_up(num_rows, kBlockRows), threads) * threads;
    Shared shared{this, &table, works, count, divide_up(num_rows, blocks)};
    for (Space& space : spaces_)
      for (int i = 0; i < count; i++) reserve(table, space, works[i], shared.block_rows, 1);
    pool_.run(divide_up(num_rows, shared.block_rows), run_piece, &shared);
  }

 private:
  static constexpr int kBlockRows = 84;  // at most: of one table of panels (grouped_tile.hpp)
  // Every thread reads all weights for its rows: with so many for each, times the number of threads, arithmetic takes longer.
  static constexpr int kRowsPerThread = 4;

  bool are_shared(int num_rows) const {
    const int threads = pool_.num_threads();
    return threads > 1 && num_rows >= kRowsPerThread * threads * threads;
  }

  struct Space {  // one thread's memory
    Buffer scratch, normed, wide, inner, added, made;
  };
  struct Shared {
    RowRunner* runner;
    const KernelTable* table;
    const RowWork* works;
    int num_works, block_rows;
  };

  static int least(int a, int b) { return a < b ? a : b; }
  static int divide_up(int a, int b) { return (a + b - 1) / b; }

  static void run_piece(void* context, int index, int thread) {
    const Shared& shared = *static_cast<const Shared*>(context);
    const int first = index * shared.block_rows, count = least(shared.block_rows, shared.works->num_rows - first);
    Space& space = shared.runner->spaces_[static_cast<size_t>(thread)];
    for (int i = 0; i < shared.num_works; i++) run_block(*shared.table, shared.runner->alone_, space, shared.works[i], first, count);
  }

  // All threads at each matrix.
  void run_together(const KernelTable& table, const RowWork& work) {
    const int step = work.second ? kBlockRows : work.num_rows;
    reserve(table, spaces_[0], work, least(step, work.num_rows), pool_.num_threads());
    for (int first = 0; first < work.num_rows; first += step)
      run_block(table, pool_, spaces_[0], work, first, least(step, work.num_rows - first));
  }

  // A piece must not throw, so memory is had before.
  static void reserve(const KernelTable& table, Space& space, const RowWork& work, int rows, int num_threads) {
    const size_t count = static_cast<size_t>(rows);
    size_t scratch = table.linear_scratch_bytes(*work.first, rows, num_threads);
    const size_t num_outputs = static_cast<size_t>((work.second ? work.second : work.first)->num_outputs);
    if (!work.out) space.made.reserve(sizeof(float) * count * num_outputs);
    if (work.out_norm) space.added.reserve(sizeof(float) * count * num_outputs);
    if (work.norm) space.normed.reserve(sizeof(float) * count * work.first->num_inputs);
    if (work.second) {
      space.wide.reserve(sizeof(float) * count * work.first->num_outputs);
      space.inner.reserve(sizeof(float) * count * work.second->num_inputs);
      const size_t other = table.linear_scratch_bytes(*work.second, rows, num_threads);
      if (other > scratch) scratch = other;
    }
    space.scratch.reserve(scratch);
  }

  static void run_block(const KernelTable& table, ThreadPool& pool, Space& space, const RowWork& work, int first, int count) {
    const LinearWeights &up = *work.first, &last = work.second ? *work.second : up;
    const float* x = work.x + static_cast<size_t>(first) * up.num_inputs;
    float* rows = work.out ? work.out + static_cast<size_t>(first) * last.num_outputs : static_cast<float*>(space.made.data());
    float* out = rows;
    if (work.out_norm) out = static_cast<float*>(space.added.data());
    const bool accumulate = work.accumulate && !work.out_norm;
    if (work.before) work.before(work.context, pool, first, count);
    run_matrices(table, pool, space, work, x, count, out, accumulate);
    if (work.out_norm) table.rms_norm(pool, out, work.out_norm, work.eps, count, last.num_outputs, rows, work.accumulate);
    if (work.then) work.then(work.context, pool, first, count, rows);
  }

  static void run_matrices(const KernelTable& table, ThreadPool& pool, Space& space, const RowWork& work, const float* x, int count,
                           float* out, bool accumulate) {
    const LinearWeights& up = *work.first;
    void* scratch = space.scratch.data();
    if (work.norm) {
      float* normed = static_cast<float*>(space.normed.data());
      table.rms_norm(pool, x, work.norm, work.eps, count, up.num_inputs, normed, false);
      x = normed;
    }
    if (!work.second) return table.linear(pool, {&up, x, out, count, accumulate, scratch, false});
    const LinearWeights& last = *work.second;
    float *wide = static_cast<float*>(space.wide.data()), *inner = static_cast<float*>(space.inner.data());
    if (work.gate == Gate::silu && table.linear_gates(up, count)) {
      table.linear(pool, {&up, x, inner, count, false, scratch, true});
    } else {
      table.linear(pool, {&up, x, wide, count, false, scratch, false});
      table.gated_activation(pool, wide, work.gate, 0.f, count, last.num_inputs, inner);
    }
    table.linear(pool, {&last, inner, out, count, accumulate, scratch, false});
  }

  ThreadPool& pool_;
  ThreadPool alone_{1, 0};  // runs everything on the thread that calls it, any number of them at once
  std::vector<Space> spaces_;
};

}  // namespace octavo
