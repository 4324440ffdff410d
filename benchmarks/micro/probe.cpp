// What this machine can do at most, with as many threads as asked: sequential reads, f32, bf16 and int8 multiply-adds.
// Compiled by probe.py for the machine that it runs on.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

template <class Body>
double seconds(int num_threads, const Body& body) {
  std::vector<std::thread> threads;
  const auto start = Clock::now();
  for (int t = 1; t < num_threads; t++) threads.emplace_back([&body, t] { body(t); });
  body(0);
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

volatile float sink;

#if defined(__AVX512F__)
using Vector = __m512;
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
using Vector = __m256;
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#else
typedef float Vector __attribute__((vector_size(16)));
Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
#endif

constexpr int kChains = 14;  // hides the latency of each instruction; with more, compilers spill those of int8
constexpr long kRounds = 900000;  // about 1.5 ms, short enough to fall between other processes' turns

// The chains must stay in registers (all loops unrolled, no casts) and differ (or the compiler computes one of them).
template <class V, class Step>
void chains(const Step& step) {
  V sum[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; i++) sum[i] = V{} + static_cast<decltype(V{}[0] + 0)>(i);
  for (long round = 0; round < kRounds; round++) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; i++) sum[i] = step(sum[i]);
  }
#pragma GCC unroll 32
  for (int i = 1; i < kChains; i++) sum[0] += sum[i];
  sink = static_cast<float>(sum[0][0]);
}

void read_all(const uint64_t* p, size_t words, size_t ahead) {
  uint64_t sum[32] = {};
  for (size_t i = 0; i < words; i += 32) {
    if (ahead)
      for (size_t j = 0; j < 32; j += 8) __builtin_prefetch(p + i + ahead + j);
    for (size_t j = 0; j < 32; j++) sum[j] ^= p[i + j];
  }
  uint64_t total = 0;
  for (uint64_t x : sum) total ^= x;
  sink = static_cast<float>(total);
}

}  // namespace

extern "C" {

// bytes a second: the best of several rounds, with and without software prefetch
double read_bandwidth(int num_threads, size_t bytes, int rounds) {
  const size_t share = bytes / static_cast<size_t>(num_threads) / 256 * 256;
  auto* data = static_cast<uint64_t*>(std::aligned_alloc(64, share * static_cast<size_t>(num_threads)));
  std::memset(data, 1, share * static_cast<size_t>(num_threads));
  double best = 1e30;
  for (int round = 0; round < 3 * rounds; round++) {
    const size_t ahead = round % 3 == 0 ? 0 : round % 3 == 1 ? 512 : 2048;  // words
    const double s = seconds(num_threads, [&](int t) { read_all(data + static_cast<size_t>(t) * (share / 8), share / 8, ahead); });
    if (s < best) best = s;
  }
  std::free(data);
  return static_cast<double>(share * static_cast<size_t>(num_threads)) / best;
}

// multiply-adds a second
double peak_f32(int num_threads) {
  Vector a, b;
  std::memset(&a, 0, sizeof a);
  std::memset(&b, 0, sizeof b);
  __asm__ __volatile__("" : "+x"(a), "+x"(b));
  const double s = seconds(num_threads, [a, b](int) {
    const Vector x = a, y = b;
    chains<Vector>([x, y](Vector c) { return multiply_add(x, y, c); });
  });
  return static_cast<double>(kRounds) * kChains * num_threads * (sizeof(Vector) / 4) / s;
}

double peak_bf16(int num_threads) {
#if defined(__AVX512BF16__)
  __m512bh a, b;
  std::memset(&a, 0, sizeof a);
  std::memset(&b, 0, sizeof b);
  __asm__ __volatile__("" : "+x"(a), "+x"(b));
  const double s = seconds(num_threads, [a, b](int) {
    const __m512bh x = a, y = b;
    chains<Vector>([x, y](Vector c) { return _mm512_dpbf16_ps(c, x, y); });
  });
  return static_cast<double>(kRounds) * kChains * num_threads * 32 / s;
#else
  return 0 * num_threads;
#endif
}

double peak_int8(int num_threads) {
#if defined(__AVX512VNNI__)
  __m512i a = _mm512_setzero_si512(), b = a;
  __asm__ __volatile__("" : "+x"(a), "+x"(b));
  const double s = seconds(num_threads, [a, b](int) {
    const __m512i x = a, y = b;
    chains<__m512i>([x, y](__m512i c) { return _mm512_dpbusd_epi32(c, x, y); });
  });
  return static_cast<double>(kRounds) * kChains * num_threads * 64 / s;
#else
  return 0 * num_threads;
#endif
}
}
