// Attention over K and V of each KV head, chosen by the format that they are stored in.
#include "attention_run.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

using F32Form = PlainForm<WidenedTiles<F32Words, kMaxHeadDim>>;
#if OCTAVO_HAS_DPBF16
using Bf16Form = PlainForm<Bf16DotTiles<kMaxHeadDim>>;
#else
using Bf16Form = PlainForm<WidenedTiles<Bf16Words, kMaxHeadDim>>;
#endif

}  // namespace

size_t attention_scratch_bytes(const AttentionArgs& args, int num_threads) {
  if (args.kv.format == KVFormat::bf16) return scratch_bytes_of<Bf16Form>(args, num_threads);
  return scratch_bytes_of<F32Form>(args, num_threads);
}

void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
  if (args.kv.format == KVFormat::bf16) return run_attention<Bf16Form>(pool, args);
  run_attention<F32Form>(pool, args);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
