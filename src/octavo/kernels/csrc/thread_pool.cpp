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

ThreadPool::ThreadPool(int num_threads, int spin_pauses) : num_threads_(num_threads), spin_pauses_(spin_pauses) {
  for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { worker(thread); });
}

ThreadPool::~ThreadPool() {
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
    for (int i = 0; i < spin_pauses_ && epoch_.load(std::memory_order_acquire) == last && !stop_; i++) OCTAVO_PAUSE();
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

void ThreadPool::drain(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const uint32_t epoch = static_cast<uint32_t>(ticket >> 32), piece = static_cast<uint32_t>(ticket);
    const Job job = jobs_[epoch % 8];
    if (piece >= job.num_pieces) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;  // success: `job` is still the current one
    job.fn(job.context, static_cast<int>(piece), thread);
    if (done_.fetch_add(1) + 1 == job.num_pieces && waiting_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::run(int num_pieces, PieceFn fn, void* context) {
  if (num_pieces <= 0) return;
  if (num_threads_ == 1 || num_pieces == 1) {
    for (int piece = 0; piece < num_pieces; piece++) fn(context, piece, 0);
    return;
  }
  const uint32_t epoch = epoch_.load() + 1;
  jobs_[epoch % 8] = {fn, context, static_cast<uint32_t>(num_pieces)};
  done_ = 0;
  ticket_.store(static_cast<uint64_t>(epoch) << 32);
  epoch_.store(epoch);
  if (num_sleepers_.load()) {  // a worker between its check and its wait holds the mutex, so it cannot miss this
    std::lock_guard<std::mutex> lock(mutex_);
    work_.notify_all();
  }
  drain(0);
  const uint32_t all = static_cast<uint32_t>(num_pieces);
  for (int i = 0; i < spin_pauses_ && done_.load(std::memory_order_acquire) != all; i++) OCTAVO_PAUSE();
  if (done_.load() != all) {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_ = true;
    finished_.wait(lock, [&] { return done_.load() == all; });
    waiting_ = false;
  }
}

}  // namespace octavo
