#include "dispatch.hpp"

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

// VNNI is of use to linear layers alone: all else is avx512's, and compiled once.
namespace avx512_vnni {
size_t linear_scratch_bytes(const LinearWeights& weights, int num_rows);
void linear(ThreadPool& pool, const LinearArgs& args);
bool linear_gates(const LinearWeights& weights, int num_rows);

static const KernelTable& table() {
  static const KernelTable made = [] {
    KernelTable table = avx512::kTable;
    table.name = "avx512_vnni";
    table.linear_scratch_bytes = linear_scratch_bytes;
    table.linear = linear;
    table.linear_gates = linear_gates;
    return table;
  }();
  return made;
}
}  // namespace avx512_vnni
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
#endif
  tables.push_back(&portable::kTable);
  return tables;
}

}  // namespace octavo
