// Layers of a decoder as Python hands them over, once for each pool: weights, norms, and where K and V lie.
#pragma once
#include <vector>

#include "bound_views.hpp"

namespace octavo {

inline Gate gate_of(const std::string& name) {
  if (name == "gelu") return Gate::gelu;
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  if (name == "clamped_swiglu") return Gate::clamped_swiglu;
  if (name == "silu") return Gate::silu;
  throw std::invalid_argument("gate '" + name + "' is not one of gelu, gelu_tanh, clamped_swiglu, silu");
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

// All arguments are checked here but for what depends on a step.
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
    require(gate != "clamped_swiglu", "decoder layers have no clamped gate");
    require(!kv.args.is_latent, "decoder layers read pairs of K and V, not latents");
    require(window >= 0 && softcap >= 0.f, "window and softcap must be 0 (none) or more");
    require(!kv.args.k_means || softcap == 0.f, "means of K can be left out of scores without softcap only");
    require(table >= 0 && rope >= 0, "a layer needs a table and a rope");
    layers_.push_back({std::move(attention_norm), std::move(mlp_norm), std::move(q_norm), std::move(k_norm),
                       std::move(post_attention_norm), std::move(post_mlp_norm), eps, scale, softcap, window, gate_of(gate), &qkv,
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

inline LayerCall layer_call(const DecoderLayer& layer, const nb::list& tables, const nb::list& ropes, const F2& hidden, const F3& q,
                            const F3& attended) {
  require(static_cast<size_t>(layer.table) < tables.size() && 2 * static_cast<size_t>(layer.rope) + 1 < ropes.size(),
          "a layer's table or rope is not among those of the step");
  BatchView& batch = nb::cast<BatchView&>(tables[layer.table]);
  require(hidden.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
  require(hidden.shape(1) == static_cast<size_t>(layer.qkv->weights.num_inputs), "hidden must have num_inputs columns");
  const CF2 cos = nb::cast<CF2>(ropes[2 * layer.rope]), sin = nb::cast<CF2>(ropes[2 * layer.rope + 1]);
  LayerCall call{&layer, rope_args(batch, cos, sin, *layer.kv, q, layer.q_norm, layer.k_norm, layer.eps),
                 attention_args(CF3(q), batch, *layer.kv, layer.scale, attended, layer.kv->args.head_dim)};
  require(static_cast<size_t>(layer.qkv->weights.num_outputs) == qkv_width(call.input), "qkv must give (heads + 2 * kv heads) * head_dim numbers");
  require(static_cast<size_t>(layer.output->weights.num_inputs) == attended.shape(1) * attended.shape(2), "output must take what heads give");
  call.attention.window = layer.window;
  call.attention.softcap = layer.softcap;
  return call;
}

}  // namespace octavo
