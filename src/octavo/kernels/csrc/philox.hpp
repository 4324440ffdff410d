// Philox4x64-10, as core/seeds.py has it in Python integers.
#pragma once
#include <cstdint>

namespace octavo {

// The first word of the block with counter (c0, 0, 0, 0).
inline uint64_t philox(uint64_t c0, uint64_t k0, uint64_t k1) {
  uint64_t c1 = 0, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    const unsigned __int128 a = static_cast<unsigned __int128>(c0) * 0xD2E7470EE14C6C93u;
    const unsigned __int128 b = static_cast<unsigned __int128>(c2) * 0xCA5A826395121157u;
    const uint64_t high_a = static_cast<uint64_t>(a >> 64), high_b = static_cast<uint64_t>(b >> 64);
    c0 = high_b ^ c1 ^ k0;
    c1 = static_cast<uint64_t>(b);
    c2 = high_a ^ c3 ^ k1;
    c3 = static_cast<uint64_t>(a);
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  return c0;
}

}  // namespace octavo
