// A pool that hands out small pieces and does not spin for long (a busy neighbour costs its share and not more).
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// fn(context, piece, thread): pieces of one run may execute in any order and on any thread, so a piece must write only
// what it owns, and its result must not depend on `thread` (law 1). A piece must not throw.
using PieceFn = void (*)(void* context, int piece, int thread);

class ThreadPool {
 public:
  // The caller of `run` is thread 0 and works too; num_threads - 1 workers are started. A thread that waits spins for
  // spin_pauses pauses of the processor before it sleeps, or for a small share of a long run. Throws
  // std::system_error when the machine gives no more threads.
  ThreadPool(int num_threads, int spin_pauses);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  // Runs pieces 0 .. num_pieces - 1 and returns when all have ended. One caller at a time.
  void run(int num_pieces, PieceFn fn, void* context);

 private:
  // Atomic, because a worker that comes late may read a job while it is replaced; its claim then fails (see drain).
  struct Job {
    std::atomic<PieceFn> fn{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<uint32_t> num_pieces{0};
  };
  void stop();
  void worker(int thread);
  void drain(int thread);
  void wake_workers();
  void wait_for_pieces(uint32_t num_pieces);
  int pauses_after(std::chrono::steady_clock::duration run) const;

  Job jobs_[2];                                  // of epoch e: jobs_[e % 2]
  alignas(64) std::atomic<uint64_t> ticket_{0};  // epoch << 32 | next piece
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> done_{0};    // pieces of this epoch that have ended
  alignas(64) std::atomic<int> num_sleepers_{0};
  std::atomic<int> patience_;         // pauses that a thread spins for, after the last run
  std::atomic<bool> waiting_{false};  // the caller sleeps
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable work_, finished_;
  int num_threads_, spin_pauses_;
  std::vector<std::thread> threads_;
};

}  // namespace octavo
