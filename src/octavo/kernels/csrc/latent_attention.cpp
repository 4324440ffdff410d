// Attention of many query heads over one latent a token (multi-head latent attention in its absorbed form).
#include "expanded_form.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

// Calls visit(form) with the form of a format. Of k8v4, a latent is K.
template <class Visit>
auto with_form(KVFormat format, Visit&& visit) {
  switch (format) {
    case KVFormat::bf16: return visit(LatentForm<Bf16Arithmetic<kMaxLatentDim>>{});
    case KVFormat::f16: return visit(LatentForm<WidenedTiles<F16Words, kMaxLatentDim>>{});
    case KVFormat::fp8_e4m3: return visit(ExpandedLatentForm<KVFormat::fp8_e4m3>{});
    case KVFormat::fp8_e5m2: return visit(ExpandedLatentForm<KVFormat::fp8_e5m2>{});
    case KVFormat::int8:
    case KVFormat::k8v4: return visit(ExpandedLatentForm<KVFormat::int8>{});
    default: return visit(LatentForm<WidenedTiles<F32Words, kMaxLatentDim>>{});
  }
}

}  // namespace

size_t latent_scratch_bytes(const AttentionArgs& args, int num_threads) {
  return with_form(args.kv.format, [&](auto form) { return scratch_bytes_of<decltype(form)>(args, num_threads); });
}

void latent_attention(ThreadPool& pool, const AttentionArgs& args) {
  with_form(args.kv.format, [&](auto form) { run_attention<decltype(form)>(pool, args); });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
