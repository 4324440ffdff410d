#include "dispatch.hpp"

#if defined(OCTAVO_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {

#define OCTAVO_DECLARE(isa) \
  namespace isa {           \
  extern const KernelTable kTable; \
  }
OCTAVO_DECLARE(portable)
#if defined(OCTAVO_X86)
OCTAVO_DECLARE(avx2)
OCTAVO_DECLARE(avx512)
OCTAVO_DECLARE(avx512_bf16)
#endif

// Sums of products of four bytes are of use to linear layers alone: all else is another level's, and compiled once.
#define OCTAVO_LINEAR_LEVEL(isa, rest)                                                      \
  namespace isa {                                                                           \
  size_t linear_scratch_bytes(const LinearWeights& weights, int num_rows, int num_threads); \
  void linear(ThreadPool& pool, const LinearArgs& args);                                    \
  bool linear_gates(const LinearWeights& weights, int num_rows);                            \
  static const KernelTable& table() {                                                       \
    static const KernelTable made = [] {                                                    \
      KernelTable table = rest::kTable;                                                     \
      table.name = #isa;                                                                    \
      table.linear_scratch_bytes = linear_scratch_bytes;                                    \
      table.linear = linear;                                                                \
      table.linear_gates = linear_gates;                                                    \
      return table;                                                                         \
    }();                                                                                    \
    return made;                                                                            \
  }                                                                                         \
  }
#if defined(OCTAVO_X86)
OCTAVO_LINEAR_LEVEL(avx512_vnni, avx512)
#elif defined(OCTAVO_ARM)
OCTAVO_LINEAR_LEVEL(neon_dot, portable)

static bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
  return true;  // in every processor of theirs that runs macOS
#else
  return false;
#endif
}
#endif

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables;
#if defined(OCTAVO_X86)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // The level that multiplies bf16 also asks for VNNI and VBMI, since its kernels use all three (all processors with
  // bf16 have them but Cooper Lake).
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) tables.push_back(&avx512_bf16::kTable);
  if (vnni) tables.push_back(&avx512_vnni::table());
  if (avx512) tables.push_back(&avx512::kTable);
  if (fma) tables.push_back(&avx2::kTable);
#elif defined(OCTAVO_ARM)
  if (has_dot_products()) tables.push_back(&neon_dot::table());
#endif
  tables.push_back(&portable::kTable);
  return tables;
}

}  // namespace octavo
