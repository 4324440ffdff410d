#include <cstdlib>
#include "ops.hpp"
namespace octavo {
namespace OCTAVO_ISA {
size_t attention_scratch_bytes(const AttentionArgs&, int) { std::abort(); }
void paged_attention(ThreadPool&, const AttentionArgs&) { std::abort(); }
}  // namespace OCTAVO_ISA
}  // namespace octavo
