#include "thread_pool.hpp"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define OCTAVO_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define OCTAVO_PAUSE() __asm__ __volatile__("yield")
#else
#define OCTAVO_PAUSE() ((void)0)
#endif

namespace octavo {

ThreadPool::ThreadPool(int num_threads, int spin_pauses)
    : patience_(spin_pauses), num_threads_(num_threads < 1 ? 1 : num_threads), spin_pauses_(spin_pauses) {
  try {
    for (int thread = 1; thread < num_threads_; thread++) threads_.emplace_back([this, thread] { worker(thread); });
  } catch (...) {  // the machine gives no more threads: those that run must end before their vector goes
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::worker(int thread) {
  uint32_t last = 0;
  for (;;) {
    for (int i = 0; i < patience_.load(std::memory_order_relaxed) && epoch_.load(std::memory_order_acquire) == last && !stop_; i++)
      OCTAVO_PAUSE();
    if (epoch_.load() == last && !stop_) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleepers_++;
      work_.wait(lock, [&] { return epoch_.load() != last || stop_; });
      num_sleepers_--;
    }
    if (stop_) return;
    last = epoch_.load();
    drain(thread);
  }
}

// Claims pieces until none is left. The job is read before the claim: if it was replaced meanwhile, the ticket was too
// (it holds the epoch), and the claim fails.
void ThreadPool::drain(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const uint32_t epoch = static_cast<uint32_t>(ticket >> 32), piece = static_cast<uint32_t>(ticket);
    const Job& job = jobs_[epoch % 2];
    const PieceFn fn = job.fn.load(std::memory_order_relaxed);
    void* const context = job.context.load(std::memory_order_relaxed);
    const uint32_t num_pieces = job.num_pieces.load(std::memory_order_relaxed);
    if (piece >= num_pieces) return;  // also with another job's number: `worker` compares epochs and comes back
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    fn(context, static_cast<int>(piece), thread);
    if (done_.fetch_add(1) + 1 == num_pieces && waiting_.load()) {
      { std::lock_guard<std::mutex> lock(mutex_); }  // the caller is asleep, or will look at done_ once more
      finished_.notify_one();
    }
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::wake_workers() {
  if (!num_sleepers_.load()) return;
  { std::lock_guard<std::mutex> lock(mutex_); }  // a worker between its check and its sleep holds the mutex
  work_.notify_all();
}

// To wait at most a 16th of a run costs little, whoever else wants the core; to wake a thread takes longer than most waits.
int ThreadPool::pauses_after(std::chrono::steady_clock::duration run) const {
  constexpr int64_t kPauseNs = 25, kShare = 16, kMostNs = 200'000;
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(run).count() / kShare;
  const int pauses = static_cast<int>((ns < kMostNs ? ns : kMostNs) / kPauseNs);
  return pauses > spin_pauses_ ? pauses : spin_pauses_;
}

void ThreadPool::wait_for_pieces(uint32_t num_pieces) {
  const int patience = patience_.load(std::memory_order_relaxed);
  for (int i = 0; i < patience && done_.load(std::memory_order_acquire) != num_pieces; i++) OCTAVO_PAUSE();
  if (done_.load() == num_pieces) return;
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_ = true;
  finished_.wait(lock, [&] { return done_.load() == num_pieces; });
  waiting_ = false;
}

void ThreadPool::run(int num_pieces, PieceFn fn, void* context) {
  if (num_pieces <= 0) return;
  if (num_threads_ == 1 || num_pieces == 1) {
    for (int piece = 0; piece < num_pieces; piece++) fn(context, piece, 0);
    return;
  }
  const uint32_t epoch = epoch_.load() + 1;
  Job& job = jobs_[epoch % 2];
  job.fn.store(fn, std::memory_order_relaxed);
  job.context.store(context, std::memory_order_relaxed);
  job.num_pieces.store(static_cast<uint32_t>(num_pieces), std::memory_order_relaxed);
  done_ = 0;
  ticket_.store(static_cast<uint64_t>(epoch) << 32);
  epoch_.store(epoch);
  wake_workers();
  const auto begin = std::chrono::steady_clock::now();
  drain(0);
  patience_.store(spin_pauses_ > 0 ? pauses_after(std::chrono::steady_clock::now() - begin) : 0, std::memory_order_relaxed);
  wait_for_pieces(static_cast<uint32_t>(num_pieces));
}

}  // namespace octavo
