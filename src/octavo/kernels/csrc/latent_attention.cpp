// Attention of many query heads over one latent a token (multi-head latent attention in its absorbed form).
#include "latent_form.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

using F32Form = LatentForm<WidenedTiles<F32Words, kMaxLatentDim>>;
#if OCTAVO_HAS_DPBF16
using Bf16Form = LatentForm<Bf16DotTiles<kMaxLatentDim>>;
#else
using Bf16Form = LatentForm<WidenedTiles<Bf16Words, kMaxLatentDim>>;
#endif

}  // namespace

size_t latent_scratch_bytes(const AttentionArgs& args, int num_threads) {
  if (args.kv.format == KVFormat::bf16) return scratch_bytes_of<Bf16Form>(args, num_threads);
  return scratch_bytes_of<F32Form>(args, num_threads);
}

void latent_attention(ThreadPool& pool, const AttentionArgs& args) {
  if (args.kv.format == KVFormat::bf16) return run_attention<Bf16Form>(pool, args);
  run_attention<F32Form>(pool, args);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
