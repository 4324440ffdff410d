// `Kernels` as Python calls it: checks shapes, owns scratch memory, releases the GIL. It does not compute.
#pragma once
#include <mutex>

#include "decoder_layer.hpp"
#include "dispatch.hpp"
#include "row_runner.hpp"

namespace octavo {

inline Activation activation_of(const std::string& name) {
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "sigmoid") return Activation::sigmoid;
  throw std::invalid_argument("activation '" + name + "' is not one of relu, gelu, gelu_tanh, sigmoid");
}

inline Gate gate_of(const std::string& name) {
  if (name == "gelu") return Gate::gelu;
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  if (name == "clamped_swiglu") return Gate::clamped_swiglu;
  if (name == "silu") return Gate::silu;
  throw std::invalid_argument("gated activation '" + name + "' is not one of gelu, gelu_tanh, clamped_swiglu, silu");
}

inline bool same_shape(const CF2& x, const F2& out) { return x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1); }

class Kernels {
 public:
  Kernels(int num_threads, const std::string& instruction_set, int spin_pauses) : pool_(num_threads, spin_pauses), rows_(pool_) {
    for (const KernelTable* table : supported_tables())
      if (!table_ && (instruction_set == "auto" || instruction_set == table->name)) table_ = table;
    if (!table_) throw std::invalid_argument("instruction set '" + instruction_set + "' is not supported by this machine or build");
  }

  const char* instruction_set() const { return table_->name; }
  int num_threads() const { return pool_.num_threads(); }
  size_t scratch_bytes() const { return scratch_.size(); }

  std::unique_ptr<Linear> pack(const CF2& weight, const std::optional<CF1>& bias, const std::string& dtype) {
    const int n = static_cast<int>(weight.shape(0)), k = static_cast<int>(weight.shape(1));
    const WeightsDtype type = weights_dtype(dtype);
    auto linear = new_linear(weights_, n, k, type, bias);
    const float* from = weight.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    if (type >= WeightsDtype::int8)
      pack_groups(pool_, from, linear->weights);
    else
      pack_linear(pool_, from, n, k, type, linear->packed.data);
    return linear;
  }

  std::unique_ptr<Linear> pack_rows_of_blocks(const CU2& blocks, const std::optional<CF1>& bias, const std::string& name) {
    const BlockKind kind = block_kind(name);
    require(blocks.shape(1) % block_bytes(kind) == 0, "a row must be a whole number of blocks");
    const int n = static_cast<int>(blocks.shape(0)), k = static_cast<int>(blocks.shape(1) / block_bytes(kind) * 32);
    auto linear = new_linear(weights_, n, k, dtype_of_blocks(kind), bias);
    const uint8_t* from = blocks.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    pack_blocks(pool_, from, kind, linear->weights);
    return linear;
  }

  void linear(const CF2& x, const Linear& weight, const F2& out, bool accumulate) {
    const LinearWeights& w = weight.weights;
    require(x.shape(1) == static_cast<size_t>(w.num_inputs), "x must have num_inputs columns");
    require(out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(w.num_outputs), "out must be [rows of x, num_outputs]");
    const RowWork work{x.data(), out.data(), nullptr, 0.f, &w, nullptr, static_cast<int>(x.shape(0)), accumulate};
    if (work.num_rows == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    rows_.run(*table_, work);
  }

  void embedding(const Linear& table, const CI1& token_ids, const F2& out) {
    const size_t n = token_ids.shape(0);
    require(out.shape(0) == n && out.shape(1) == static_cast<size_t>(table.weights.num_inputs), "out must be [tokens, num_inputs]");
    for (size_t i = 0; i < n; i++)
      require(token_ids.data()[i] >= 0 && token_ids.data()[i] < table.weights.num_outputs, "a token id is outside the vocabulary");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->embedding(pool_, table.weights, token_ids.data(), static_cast<int>(n), out.data());
  }

  void rms_norm(const CF2& x, const CF1& weight, float eps, const F2& out, bool accumulate) {
    require(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1) && weight.shape(0) == x.shape(1), "x, weight and out must agree");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->rms_norm(pool_, x.data(), weight.data(), eps, static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), out.data(), accumulate);
  }

  void silu_mul(const CF2& gate_up, const F2& out) {
    require(out.shape(0) == gate_up.shape(0) && 2 * out.shape(1) == gate_up.shape(1), "gate_up must be [rows, 2 * width of out]");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->silu_mul(pool_, gate_up.data(), static_cast<int>(out.shape(0)), static_cast<int>(out.shape(1)), out.data());
  }

  void layer_norm(const CF2& x, const CF1& weight, const std::optional<CF1>& bias, float eps, const F2& out) {
    require(same_shape(x, out) && weight.shape(0) == x.shape(1), "x, weight and out must agree");
    require(!bias || bias->shape(0) == x.shape(1), "the bias must have one number a column");
    const float* shift = bias ? bias->data() : nullptr;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->layer_norm(pool_, x.data(), weight.data(), shift, eps, static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), out.data());
  }

  void activation(const CF2& x, const std::string& kind, const F2& out) {
    require(same_shape(x, out), "x and out must agree");
    const Activation which = activation_of(kind);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->activation(pool_, x.data(), which, static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), out.data());
  }

  void gated_activation(const CF2& gate_up, const std::string& kind, float limit, const F2& out) {
    require(out.shape(0) == gate_up.shape(0) && 2 * out.shape(1) == gate_up.shape(1), "gate_up must be [rows, 2 * width of out]");
    const Gate which = gate_of(kind);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->gated_activation(pool_, gate_up.data(), which, limit, static_cast<int>(out.shape(0)), static_cast<int>(out.shape(1)), out.data());
  }

  void softmax(const CF2& x, const F2& out) {
    require(same_shape(x, out) && x.shape(1) > 0, "x and out must agree and not be empty");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->softmax(pool_, x.data(), static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), out.data());
  }

  void soft_cap(const CF2& x, float cap, const F2& out) {
    require(same_shape(x, out) && cap > 0.f, "x and out must agree, and the cap be positive");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->soft_cap(pool_, x.data(), cap, static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), out.data());
  }

  void rotate(const F3& heads, const CI1& positions, const CF2& cos, const CF2& sin, int first) {
    RotateArgs args{heads.data(), positions.data(), cos.data(), sin.data(), static_cast<int>(heads.shape(0)),
                    static_cast<int>(heads.shape(1)), static_cast<int>(heads.shape(2)), static_cast<int>(cos.shape(1)), first};
    require(positions.shape(0) == heads.shape(0), "there must be one position a row");
    require(sin.shape(0) == cos.shape(0) && sin.shape(1) == cos.shape(1), "cos and sin must agree");
    require(first >= 0 && first + 2 * args.half <= args.head_dim, "the rotated dimensions must lie inside a head");
    for (int i = 0; i < args.num_rows; i++)
      require(args.positions[i] >= 0 && static_cast<size_t>(args.positions[i]) < cos.shape(0), "a position is outside the rope table");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->rotate(pool_, args);
  }

  void rope_write(const CF2& qkv, BatchView& batch, const CF2& cos, const CF2& sin, const KVView& kv, const F3& out_q,
                  const std::optional<CF1>& q_norm, const std::optional<CF1>& k_norm, float norm_eps) {
    require(qkv.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
    RopeWriteArgs args = rope_args(batch, cos, sin, kv, out_q, q_norm, k_norm, norm_eps);
    require(qkv.shape(1) == qkv_width(args), "qkv must be [tokens, (heads + 2 * kv heads) * head_dim]");
    args.qkv = qkv.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->rope_write(pool_, args, 0, args.num_tokens);
    table_->finish_tiles(pool_, args);
  }

  static constexpr int kRowsToAskFor = 64;  // of more, many write to the same lines

  void attention_input(const CF2& x, const CF1& norm, float eps, const Linear& qkv, BatchView& batch, const CF2& cos, const CF2& sin,
                       const KVView& kv, const F3& out_q, const std::optional<CF1>& q_norm, const std::optional<CF1>& k_norm) {
    require(x.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
    RopeWriteArgs args = rope_args(batch, cos, sin, kv, out_q, q_norm, k_norm, eps);
    check_norm_linear(x, norm, qkv);
    require(static_cast<size_t>(qkv.weights.num_outputs) == qkv_width(args), "qkv must give (heads + 2 * kv heads) * head_dim numbers");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    project(x.data(), norm.data(), qkv.weights, args);
  }

  void norm_linear_into(const CF2& x, const CF1& norm, float eps, const Linear& weight, const F2& out) {
    check_norm_linear(x, norm, weight);
    require(out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(weight.weights.num_outputs), "out must be [rows of x, num_outputs]");
    if (x.shape(0) == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    norm_linear(x.data(), static_cast<int>(x.shape(0)), norm.data(), eps, weight.weights, out.data());
  }

  void gated_mlp(const F2& hidden, const CF1& norm, float eps, const Linear& gate_up, const Linear& down, const std::string& gate,
                 const std::optional<CF1>& post_norm) {
    check_norm_linear(hidden, norm, gate_up);
    const LinearWeights& w = down.weights;
    require(2 * w.num_inputs == gate_up.weights.num_outputs, "gate_up must give twice what down takes");
    require(hidden.shape(1) == static_cast<size_t>(w.num_outputs), "down must give as many numbers as hidden has columns");
    require(!post_norm || post_norm->shape(0) == hidden.shape(1), "the norm's weight must have one number a column of hidden");
    const int rows = static_cast<int>(hidden.shape(0));
    const RowWork work{hidden.data(), hidden.data(), norm.data(), eps, &gate_up.weights, &w, rows, true, data_of(post_norm), mlp_gate_of(gate)};
    if (rows == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    rows_.run(*table_, work);
  }

  void decoder_layers(const LayerStack& stack, size_t count, const F2& hidden, const std::vector<BatchView*>& tables,
                      const std::vector<CF2>& ropes, const F3& heads) {
    require(count <= stack.layers().size(), "there are fewer layers");
    if (hidden.shape(0) == 0) return;
    std::vector<LayerCall> calls;
    calls.reserve(count);
    for (size_t i = 0; i < count; i++) calls.push_back(layer_call(stack.layers()[i], tables, ropes, hidden, heads));
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    run_layers(calls, hidden.data());
  }

  void latent_write(const CF2& latent, BatchView& batch, const KVView& kv) {
    require(kv.args.is_latent, "latents are written to a latent layer");
    require(latent.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
    require(latent.shape(1) == static_cast<size_t>(kv.args.head_dim), "latent must be [tokens, head_dim]");
    check_tables(batch, kv);
    LatentWriteArgs args{latent.data(), batch.args, kv.args, static_cast<int>(batch.num_tokens)};
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->latent_write(pool_, args);
  }

  void paged_attention(const CF3& q, BatchView& batch, const KVView& kv, float scale, const F3& out, int window, float softcap,
                       const std::optional<CF1>& sinks) {
    require(!kv.args.is_latent, "paged_attention reads pairs of K and V; use latent_attention for latents");
    require(window >= 0, "window must be 0 (all keys) or more");
    require(softcap >= 0.f, "softcap must be 0 (none) or more");
    require(!sinks || sinks->shape(0) == q.shape(1), "sinks must be [num_heads]");
    require(!kv.args.k_means || (softcap == 0.f && !sinks), "means of K can be left out of scores without softcap and sinks only");
    AttentionArgs args = attention_args(q, batch, kv, scale, out, kv.args.head_dim);
    args.window = window;
    args.softcap = softcap;
    args.sinks = sinks ? sinks->data() : nullptr;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    attend(args);
  }

  void attention_mass(const CF3& q, BatchView& batch, const KVView& kv, float scale, int sequence, int first_row, const L2& mass) {
    require(!kv.args.is_latent, "attention_mass reads K of KV heads, not latents");
    MassArgs args = mass_args(q, batch, kv, scale, sequence, first_row, mass);
    if (args.num_rows == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.attention.scratch = scratch_.reserve(table_->mass_scratch_bytes(args, pool_.num_threads()));
    table_->attention_mass(pool_, args);
  }

  void latent_attention(const CF3& q, BatchView& batch, const KVView& kv, int rank, float scale, const F3& out) {
    require(kv.args.is_latent, "latent_attention reads latents; use paged_attention for pairs of K and V");
    require(rank >= 16 && rank % 16 == 0 && rank <= kv.args.head_dim, "rank must be a multiple of 16 up to head_dim");
    AttentionArgs args = attention_args(q, batch, kv, scale, out, rank);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.scratch = scratch_.reserve(table_->latent_scratch_bytes(args, pool_.num_threads()));
    table_->latent_attention(pool_, args);
  }

  void draw(const CF2& logits, const CI1& rows, const CD2& settings, bool must_be_finite, const I1& out) {
    require(settings.shape(0) == rows.shape(0) && out.shape(0) == rows.shape(0), "rows, settings and out must have the same length");
    require(settings.shape(1) * sizeof(double) == sizeof(DrawSettings), "settings must be [draws, 5]");
    require(logits.shape(1) > 0 && logits.shape(1) <= size_t{1} << 20, "logits must have 1 to 2^20 columns");
    for (size_t i = 0; i < rows.shape(0); i++)
      require(rows.data()[i] >= 0 && static_cast<size_t>(rows.data()[i]) < logits.shape(0), "a row is outside the logits");
    DrawArgs args{logits.data(), rows.data(), reinterpret_cast<const DrawSettings*>(settings.data()), out.data(),
                  static_cast<int>(rows.shape(0)), static_cast<int>(logits.shape(1)), must_be_finite, nullptr};
    if (args.num_draws == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.scratch = scratch_.reserve(table_->draw_scratch_bytes(args.vocab_size, pool_.num_threads()));
    table_->draw(pool_, args);
  }

  void copy_blocks(const U1& pool, size_t block_bytes, const CI1& sources, const CI1& targets) {
    require(sources.shape(0) == targets.shape(0), "sources and targets must have the same length");
    require(block_bytes > 0 && pool.shape(0) % block_bytes == 0, "the pool must be a whole number of blocks");
    const int64_t num_blocks = static_cast<int64_t>(pool.shape(0) / block_bytes);
    for (size_t i = 0; i < sources.shape(0); i++)
      require(sources.data()[i] >= 0 && sources.data()[i] < num_blocks && targets.data()[i] >= 0 && targets.data()[i] < num_blocks,
              "a block id is outside the pool");
    nb::gil_scoped_release release;
    for (size_t i = 0; i < sources.shape(0); i++)
      std::memmove(pool.data() + static_cast<size_t>(targets.data()[i]) * block_bytes,
                   pool.data() + static_cast<size_t>(sources.data()[i]) * block_bytes, block_bytes);
  }

 private:
  struct Projection {  // kept while its work runs
    const KernelTable* table;
    const RopeWriteArgs* args;
  };

  // q, k and v of rows; K and V are written.
  RowWork work_of(const Projection& projection, const float* x, const float* norm, const LinearWeights& qkv) {
    const RopeWriteArgs& args = *projection.args;
    RowWork work{x, nullptr, norm, args.norm_eps, &qkv, nullptr, args.num_tokens, false};
    if (args.num_tokens <= kRowsToAskFor) work.before = ask_for_slots;
    work.then = write_rows;
    work.context = &projection;
    return work;
  }

  void project(const float* x, const float* norm, const LinearWeights& qkv, const RopeWriteArgs& args) {
    const Projection projection{table_, &args};
    rows_.run(*table_, work_of(projection, x, norm, qkv));
    table_->finish_tiles(pool_, args);
  }

  void attend(AttentionArgs& args) {
    args.scratch = scratch_.reserve(table_->attention_scratch_bytes(args, pool_.num_threads()));
    table_->paged_attention(pool_, args);
  }

  // What lies between two attentions goes block by block of rows through all of it.
  void run_layers(std::vector<LayerCall>& calls, float* hidden) {
    for (size_t i = 0; i < calls.size(); i++) {
      const DecoderLayer& layer = *calls[i].layer;
      const int rows = calls[i].input.num_tokens;
      if (i == 0) project(hidden, layer.attention_norm.data(), layer.qkv->weights, calls[i].input);
      attend(calls[i].attention);
      RowWork works[3] = {{calls[i].attention.out, hidden, nullptr, layer.eps, &layer.output->weights, nullptr, rows, true,
                           data_of(layer.post_attention_norm)},
                          {hidden, hidden, layer.mlp_norm.data(), layer.eps, &layer.gate_up->weights, &layer.down->weights, rows, true,
                           data_of(layer.post_mlp_norm), layer.gate},
                          {}};
      if (i + 1 == calls.size()) return rows_.run(*table_, works, 2);
      LayerCall& next = calls[i + 1];
      const Projection projection{table_, &next.input};
      works[2] = work_of(projection, hidden, next.layer->attention_norm.data(), next.layer->qkv->weights);
      rows_.run(*table_, works, 3);
      table_->finish_tiles(pool_, next.input);
    }
  }

  template <class Matrix>
  static void check_norm_linear(const Matrix& x, const CF1& norm, const Linear& linear) {
    require(x.shape(1) == static_cast<size_t>(linear.weights.num_inputs), "x must have num_inputs columns");
    require(norm.shape(0) == x.shape(1), "the norm's weight must have one number a column of x");
  }

  void norm_linear(const float* x, int rows, const float* norm, float eps, const LinearWeights& w, float* out) {
    rows_.run(*table_, {x, out, norm, eps, &w, nullptr, rows, false});
  }

  static void ask_for_slots(const void* context, ThreadPool& pool, int first, int count) {
    const Projection& projection = *static_cast<const Projection*>(context);
    projection.table->ask_for_slots(pool, *projection.args, first, count);
  }

  static void write_rows(const void* context, ThreadPool& pool, int first, int count, const float* made) {
    const Projection& projection = *static_cast<const Projection*>(context);
    RopeWriteArgs args = *projection.args;
    args.qkv = made;
    args.first_row = first;
    projection.table->rope_write(pool, args, first, count);
  }

  ThreadPool pool_;
  const KernelTable* table_ = nullptr;
  RowRunner rows_;
  Buffer scratch_;
  WeightMemory weights_;
  std::mutex mutex_;  // one caller at a time: the pool and the scratch memory are shared
};

}  // namespace octavo
