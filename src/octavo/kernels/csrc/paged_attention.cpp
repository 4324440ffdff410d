// Attention over K and V of each KV head, chosen by the format that they are stored in.
#include "attention_mass.hpp"
#include "byte_forms.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

// Calls visit(form) with the form of a format.
template <class Visit>
auto with_form(KVFormat format, Visit&& visit) {
  switch (format) {
    case KVFormat::bf16: return visit(PlainForm<Bf16Arithmetic<kMaxHeadDim>>{});
    case KVFormat::f16: return visit(PlainForm<WidenedTiles<F16Words, kMaxHeadDim>>{});
    case KVFormat::fp8_e4m3: return visit(ExpandedForm<KVFormat::fp8_e4m3>{});
    case KVFormat::fp8_e5m2: return visit(ExpandedForm<KVFormat::fp8_e5m2>{});
    case KVFormat::int8: return visit(Int8Form{});
    case KVFormat::k8v4: return visit(K8V4Form{});
    case KVFormat::int4: return visit(Int4Form{});
    default: return visit(PlainForm<WidenedTiles<F32Words, kMaxHeadDim>>{});
  }
}

}  // namespace

size_t attention_scratch_bytes(const AttentionArgs& args, int num_threads) {
  return with_form(args.kv.format, [&](auto form) { return scratch_bytes_of<decltype(form)>(args, num_threads); });
}

void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
  with_form(args.kv.format, [&](auto form) { run_attention<decltype(form)>(pool, args); });
}

size_t mass_scratch_bytes(const MassArgs& args, int num_threads) {
  return with_form(args.attention.kv.format, [&](auto form) { return mass_scratch_bytes_of<decltype(form)>(args, num_threads); });
}

void attention_mass(ThreadPool& pool, const MassArgs& args) {
  with_form(args.attention.kv.format, [&](auto form) { run_mass<decltype(form)>(pool, args); });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
