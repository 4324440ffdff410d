// Who computes which piece of attention, and which tiles a thread asks the memory for before it comes to them.
#pragma once
#include "attention_tiles.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// The pieces of one thread: its number, that plus the number of threads, and so on; of these, those from `first` to `end`
// are left. Its thread takes the first, so that it knows which one comes next; who has none left takes another's last.
struct alignas(64) Turns {
  uint64_t range;  // end << 32 | first

  static int first(uint64_t range) { return static_cast<int>(range & 0xffffffffu); }
  static int end(uint64_t range) { return static_cast<int>(range >> 32); }
  int take(bool is_own) {  // -1: none is left
    uint64_t old = __atomic_load_n(&range, __ATOMIC_ACQUIRE);
    while (first(old) < end(old)) {
      const uint64_t less = is_own ? old + 1 : old - (uint64_t{1} << 32);
      if (__atomic_compare_exchange_n(&range, &old, less, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return is_own ? first(old) : end(old) - 1;
    }
    return -1;
  }
};

// How far a thread has asked the memory for tiles, in the order in which it will compute with them.
struct alignas(64) Ahead {
  int piece, span, tile;  // the next to be asked for: `tile` of those that the piece's rows see of the span
  int num_tiles;          // asked for and not computed yet
  int expected;           // the piece that they begin with, once this one has ended; -1: none
};

constexpr int kTilesAhead = kSpanTiles;

}  // namespace OCTAVO_ISA
}  // namespace octavo
