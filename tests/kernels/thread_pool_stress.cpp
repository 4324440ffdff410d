// Many short runs with every kind of waiting; each piece writes what it owns without a lock. Built with a race detector.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "thread_pool.hpp"

namespace {

struct Sums {
  std::vector<int>* values;
  int added;
};

void add(void* context, int piece, int) {
  const Sums& sums = *static_cast<const Sums*>(context);
  (*sums.values)[static_cast<size_t>(piece)] += sums.added;
  volatile int delay = 0;
  for (int i = 0; i < piece * 7919 % 200; i++) delay = delay + 1;
}

bool stress(int num_threads, int spin_pauses, int runs) {
  octavo::ThreadPool pool(num_threads, spin_pauses);
  std::vector<int> values(300), expected(300);
  unsigned random = 1;
  for (int run = 0; run < runs; run++) {
    random = random * 1664525u + 1013904223u;
    const int pieces = static_cast<int>((random >> 16) % (run % 5 ? 6 : 300));
    Sums sums = {&values, static_cast<int>(random >> 28) + 1};
    pool.run(pieces, add, &sums);
    for (int i = 0; i < pieces; i++) expected[static_cast<size_t>(i)] += sums.added;
    if (values != expected) return false;
  }
  return true;
}

}  // namespace

int main(int, char** argv) {
  const int runs = std::atoi(argv[1]);
  for (int num_threads : {1, 2, 3, 4, 8})
    for (int spin_pauses : {0, 20, 200, 2000})
      if (!stress(num_threads, spin_pauses, runs)) {
        std::printf("wrong sums with %d threads, %d pauses\n", num_threads, spin_pauses);
        return 1;
      }
  for (int i = 0; i < 200; i++)
    if (!stress(4, i % 3 * 50, i % 2)) return 1;  // start and stop, with and without a run
  return 0;
}
