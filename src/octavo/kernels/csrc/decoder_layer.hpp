// Layers of a decoder as Python hands them over, once for each pool: weights, norms, and where K and V lie.
#pragma once
#include <vector>

#include "bound_views.hpp"

namespace octavo {

// Of a gated MLP, which has no limit for its gate.
inline Gate mlp_gate_of(const std::string& name) {
  if (name == "silu") return Gate::silu;
  if (name == "gelu") return Gate::gelu;
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  throw std::invalid_argument("gate '" + name + "' of an MLP is not one of silu, gelu, gelu_tanh");
}

inline const float* data_of(const std::optional<CF1>& array) { return array ? array->data() : nullptr; }

struct DecoderLayer {
  CF1 attention_norm, mlp_norm;
  std::optional<CF1> q_norm, k_norm, post_attention_norm, post_mlp_norm;
  float eps, scale, softcap;
  int window;
  Gate gate;
  const Linear *qkv, *output, *gate_up, *down;  // kept alive by the stack, as the view is
  const KVView* kv;
  int table, rope;  // which of a step's
};

// What a layer is made of fits, or it is refused; what depends on a step is checked with it (`layer_call`).
class LayerStack {
 public:
  void add(CF1 attention_norm, float eps, const Linear& qkv, std::optional<CF1> q_norm, std::optional<CF1> k_norm, const Linear& output,
           std::optional<CF1> post_attention_norm, CF1 mlp_norm, const Linear& gate_up, const Linear& down,
           std::optional<CF1> post_mlp_norm, const std::string& gate, float scale, int window, float softcap, const KVView& kv, int table,
           int rope) {
    const size_t width = static_cast<size_t>(qkv.weights.num_inputs);
    require(attention_norm.shape(0) == width && mlp_norm.shape(0) == width, "the norms must have one number a column of hidden");
    for (const auto& norm : {post_attention_norm, post_mlp_norm})
      require(!norm || norm->shape(0) == width, "the norms must have one number a column of hidden");
    require(gate_up.weights.num_inputs == qkv.weights.num_inputs && output.weights.num_outputs == qkv.weights.num_inputs &&
                down.weights.num_outputs == qkv.weights.num_inputs,
            "matrices must take and give what hidden has of columns");
    require(gate_up.weights.num_outputs == 2 * down.weights.num_inputs, "gate_up must give twice what down takes");
    require(!kv.args.is_latent, "decoder layers read pairs of K and V, not latents");
    const size_t dim = static_cast<size_t>(kv.args.head_dim), heads = static_cast<size_t>(output.weights.num_inputs) / dim;
    require(static_cast<size_t>(output.weights.num_inputs) == heads * dim, "output must take whole heads");
    require(static_cast<size_t>(qkv.weights.num_outputs) == (heads + 2 * static_cast<size_t>(kv.args.num_kv_heads)) * dim,
            "qkv must give (heads + 2 * kv heads) * head_dim numbers");
    for (const auto& norm : {q_norm, k_norm}) require(!norm || norm->shape(0) == dim, "q_norm and k_norm must be [head_dim]");
    require(window >= 0 && softcap >= 0.f, "window and softcap must be 0 (none) or more");
    require(!kv.args.k_means || softcap == 0.f, "means of K can be left out of scores without softcap only");
    require(table >= 0 && rope >= 0, "a layer needs a table and a rope");
    layers_.push_back({std::move(attention_norm), std::move(mlp_norm), std::move(q_norm), std::move(k_norm),
                       std::move(post_attention_norm), std::move(post_mlp_norm), eps, scale, softcap, window, mlp_gate_of(gate), &qkv,
                       &output, &gate_up, &down, &kv, table, rope});
  }

  const std::vector<DecoderLayer>& layers() const { return layers_; }

 private:
  std::vector<DecoderLayer> layers_;
};

// What a step adds to a layer.
struct LayerCall {
  const DecoderLayer* layer;
  RopeWriteArgs input;
  AttentionArgs attention;
};

// ropes: cos, sin, cos, sin ...; who calls keeps them as long as the call is used.
inline LayerCall layer_call(const DecoderLayer& layer, const std::vector<BatchView*>& tables, const std::vector<CF2>& ropes,
                            const F2& hidden, const F3& heads) {
  const size_t table = static_cast<size_t>(layer.table), rope = 2 * static_cast<size_t>(layer.rope);
  require(table < tables.size() && rope + 1 < ropes.size(), "a layer's table or rope is not among those of the step");
  BatchView& batch = *tables[table];
  require(hidden.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
  require(hidden.shape(1) == static_cast<size_t>(layer.qkv->weights.num_inputs), "hidden must have num_inputs columns");
  LayerCall call{&layer, rope_args(batch, ropes[rope], ropes[rope + 1], *layer.kv, heads, layer.q_norm, layer.k_norm, layer.eps),
                 attention_args(CF3(heads), batch, *layer.kv, layer.scale, heads, layer.kv->args.head_dim)};
  require(static_cast<size_t>(layer.output->weights.num_inputs) == heads.shape(1) * heads.shape(2), "heads must be those that output takes");
  call.attention.window = layer.window;
  call.attention.softcap = layer.softcap;
  return call;
}

}  // namespace octavo
