// Attention over K and V of each KV head, chosen by the format that they are stored in.
#include "attention_mass.hpp"
#include "byte_forms.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

// Calls visit(form) with the form of a layer's format. Where channels of K have scales, keys have less error than a query in
// 8 bits would add: it gets 16.
template <class Visit>
auto with_form(const KVLayerArgs& kv, Visit&& visit) {
  switch (kv.format) {
    case KVFormat::bf16: return visit(PlainForm<Bf16Arithmetic<kMaxHeadDim>>{});
    case KVFormat::f16: return visit(PlainForm<WidenedTiles<F16Words, kMaxHeadDim>>{});
    case KVFormat::fp8_e4m3: return visit(ExpandedForm<KVFormat::fp8_e4m3>{});
    case KVFormat::fp8_e5m2: return visit(ExpandedForm<KVFormat::fp8_e5m2>{});
    case KVFormat::int8: return kv.k_scales ? visit(FineInt8Form{}) : visit(Int8Form{});
    case KVFormat::k8v4: return visit(K8V4Form{});
    case KVFormat::int4: return visit(Int4Form{});
    default: return visit(PlainForm<WidenedTiles<F32Words, kMaxHeadDim>>{});
  }
}

}  // namespace

size_t attention_scratch_bytes(const AttentionArgs& args, int num_threads) {
  return with_form(args.kv, [&](auto form) { return scratch_bytes_of<decltype(form)>(args, num_threads); });
}

void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
  with_form(args.kv, [&](auto form) { run_attention<decltype(form)>(pool, args); });
}

size_t mass_scratch_bytes(const MassArgs& args, int num_threads) {
  return with_form(args.attention.kv, [&](auto form) { return mass_scratch_bytes_of<decltype(form)>(args, num_threads); });
}

void attention_mass(ThreadPool& pool, const MassArgs& args) {
  with_form(args.attention.kv, [&](auto form) { run_mass<decltype(form)>(pool, args); });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
