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
OCTAVO_DECLARE(avx512_vnni)
OCTAVO_DECLARE(avx512_bf16)
#endif

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables;
#if defined(OCTAVO_X86)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // Every processor that multiplies bf16 has VNNI too; the level asks for both, since its kernels use both.
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512_bf16::kTable);
  if (vnni) tables.push_back(&avx512_vnni::kTable);
  if (avx512) tables.push_back(&avx512::kTable);
  if (fma) tables.push_back(&avx2::kTable);
#endif
  tables.push_back(&portable::kTable);
  return tables;
}

}  // namespace octavo
