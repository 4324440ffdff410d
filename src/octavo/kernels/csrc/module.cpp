// The Python binding: checks shapes, owns scratch memory, releases the GIL. It does not compute.
#include <mutex>

#include "bound_types.hpp"
#include "dispatch.hpp"

namespace {

class Kernels {
 public:
  Kernels(int num_threads, const std::string& instruction_set, int spin_pauses) : pool_(num_threads, spin_pauses) {
    for (const KernelTable* table : supported_tables())
      if (!table_ && (instruction_set == "auto" || instruction_set == table->name)) table_ = table;
    if (!table_) throw std::invalid_argument("instruction set '" + instruction_set + "' is not supported by this machine or build");
  }

  const char* instruction_set() const { return table_->name; }
  int num_threads() const { return pool_.num_threads(); }

  std::unique_ptr<Linear> pack(const CF2& weight, const std::optional<CF1>& bias, const std::string& dtype) {
    const int n = static_cast<int>(weight.shape(0)), k = static_cast<int>(weight.shape(1));
    const WeightsDtype type = weights_dtype(dtype);
    auto linear = new_linear(n, k, type, bias);
    const float* from = weight.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    if (type >= WeightsDtype::int8)
      pack_groups(pool_, from, n, k, type, linear->packed.data());
    else
      pack_linear(pool_, from, n, k, type, linear->packed.data());
    return linear;
  }

  std::unique_ptr<Linear> pack_rows_of_blocks(const CU2& blocks, const std::optional<CF1>& bias, const std::string& name) {
    const BlockKind kind = block_kind(name);
    require(blocks.shape(1) % block_bytes(kind) == 0, "a row must be a whole number of blocks");
    const int n = static_cast<int>(blocks.shape(0)), k = static_cast<int>(blocks.shape(1) / block_bytes(kind) * 32);
    auto linear = new_linear(n, k, dtype_of_blocks(kind), bias);
    const uint8_t* from = blocks.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    pack_blocks(pool_, from, n, k, kind, linear->packed.data());
    return linear;
  }

  void linear(const CF2& x, const Linear& weight, const F2& out, bool accumulate) {
    const LinearWeights& w = weight.weights;
    require(x.shape(1) == static_cast<size_t>(w.num_inputs), "x must have num_inputs columns");
    require(out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(w.num_outputs), "out must be [rows of x, num_outputs]");
    LinearArgs args{&w, x.data(), out.data(), static_cast<int>(x.shape(0)), accumulate, nullptr};
    if (args.num_rows == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    run_linear(args);
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

  void rms_norm(const CF2& x, const CF1& weight, float eps, const F2& out) {
    require(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1) && weight.shape(0) == x.shape(1), "x, weight and out must agree");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->rms_norm(pool_, x.data(), weight.data(), eps, static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)), out.data());
  }

  void silu_mul(const CF2& gate_up, const F2& out) {
    require(out.shape(0) == gate_up.shape(0) && 2 * out.shape(1) == gate_up.shape(1), "gate_up must be [rows, 2 * width of out]");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->silu_mul(pool_, gate_up.data(), static_cast<int>(out.shape(0)), static_cast<int>(out.shape(1)), out.data());
  }

  void rope_write(const CF2& qkv, BatchView& batch, const CF2& cos, const CF2& sin, const KVView& kv, const F3& out_q,
                  const std::optional<CF1>& q_norm, const std::optional<CF1>& k_norm, float norm_eps) {
    require(qkv.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
    RopeWriteArgs args = rope_args(batch, cos, sin, kv, out_q, q_norm, k_norm, norm_eps);
    require(qkv.shape(1) == qkv_width(args), "qkv must be [tokens, (heads + 2 * kv heads) * head_dim]");
    args.qkv = qkv.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->rope_write(pool_, args);
  }

  void attention_input(const CF2& x, const CF1& norm, float eps, const Linear& qkv, BatchView& batch, const CF2& cos, const CF2& sin,
                       const KVView& kv, const F3& out_q, const std::optional<CF1>& q_norm, const std::optional<CF1>& k_norm) {
    require(x.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
    RopeWriteArgs args = rope_args(batch, cos, sin, kv, out_q, q_norm, k_norm, eps);
    check_norm_linear(x, norm, qkv);
    require(static_cast<size_t>(qkv.weights.num_outputs) == qkv_width(args), "qkv must give (heads + 2 * kv heads) * head_dim numbers");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.qkv = norm_linear_here(x.data(), static_cast<int>(x.shape(0)), norm.data(), eps, qkv.weights);
    table_->rope_write(pool_, args);
  }

  void norm_linear_into(const CF2& x, const CF1& norm, float eps, const Linear& weight, const F2& out) {
    check_norm_linear(x, norm, weight);
    require(out.shape(0) == x.shape(0) && out.shape(1) == static_cast<size_t>(weight.weights.num_outputs), "out must be [rows of x, num_outputs]");
    if (x.shape(0) == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    norm_linear(x.data(), static_cast<int>(x.shape(0)), norm.data(), eps, weight.weights, out.data());
  }

  void gated_mlp(const F2& hidden, const CF1& norm, float eps, const Linear& gate_up, const Linear& down) {
    check_norm_linear(hidden, norm, gate_up);
    const LinearWeights& w = down.weights;
    require(2 * w.num_inputs == gate_up.weights.num_outputs, "gate_up must give twice what down takes");
    require(hidden.shape(1) == static_cast<size_t>(w.num_outputs), "down must give as many numbers as hidden has columns");
    const int rows = static_cast<int>(hidden.shape(0));
    if (rows == 0) return;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    for (int first = 0; first < rows; first += kMlpRows) {
      const int count = rows - first < kMlpRows ? rows - first : kMlpRows;
      float* block = hidden.data() + static_cast<size_t>(first) * w.num_outputs;
      const float* both = norm_linear_here(block, count, norm.data(), eps, gate_up.weights);
      float* inner = static_cast<float*>(inner_.reserve(sizeof(float) * count * w.num_inputs));
      table_->silu_mul(pool_, both, count, w.num_inputs, inner);
      run_linear({&w, inner, block, count, true, nullptr});
    }
  }

  void paged_attention(const CF3& q, BatchView& batch, const KVView& kv, float scale, const F3& out) {
    const KVLayerArgs& layer = kv.args;
    require(q.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
    require(q.shape(2) == static_cast<size_t>(layer.head_dim), "q must be [tokens, heads, head_dim]");
    require(q.shape(1) % static_cast<size_t>(layer.num_kv_heads) == 0, "the heads must be a multiple of the KV heads");
    for (size_t i = 0; i < 3; i++) require(out.shape(i) == q.shape(i), "out must have the shape of q");
    check_tables(batch, kv);
    AttentionArgs args{q.data(), batch.args, layer, out.data(), static_cast<int>(q.shape(0)), static_cast<int>(q.shape(1)), scale, nullptr};
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.scratch = scratch_.reserve(table_->attention_scratch_bytes(args, pool_.num_threads()));
    table_->paged_attention(pool_, args);
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
  // All but qkv.
  static RopeWriteArgs rope_args(BatchView& batch, const CF2& cos, const CF2& sin, const KVView& kv, const F3& out_q,
                                 const std::optional<CF1>& q_norm, const std::optional<CF1>& k_norm, float norm_eps) {
    const size_t dim = static_cast<size_t>(kv.args.head_dim);
    require(out_q.shape(0) == batch.num_tokens && out_q.shape(2) == dim, "out_q must be [tokens, heads, head_dim]");
    require(sin.shape(0) == cos.shape(0) && sin.shape(1) == cos.shape(1) && 2 * cos.shape(1) <= dim, "cos and sin must agree and fit head_dim");
    require(!q_norm || q_norm->shape(0) == dim, "q_norm must be [head_dim]");
    require(!k_norm || k_norm->shape(0) == dim, "k_norm must be [head_dim]");
    require(static_cast<size_t>(batch.num_positions) <= cos.shape(0), "a position is outside the rope table");
    check_tables(batch, kv);
    return {nullptr, batch.args, cos.data(), sin.data(), static_cast<int>(cos.shape(1)), kv.args, out_q.data(),
            static_cast<int>(batch.num_tokens), static_cast<int>(out_q.shape(1)), q_norm ? q_norm->data() : nullptr,
            k_norm ? k_norm->data() : nullptr, norm_eps};
  }

  static constexpr int kMlpRows = 64;  // what lies between the two matrices of a block stays in the second-level cache

  static size_t qkv_width(const RopeWriteArgs& args) {
    return (static_cast<size_t>(args.num_heads) + 2 * static_cast<size_t>(args.kv.num_kv_heads)) * static_cast<size_t>(args.kv.head_dim);
  }

  template <class Matrix>
  static void check_norm_linear(const Matrix& x, const CF1& norm, const Linear& linear) {
    require(x.shape(1) == static_cast<size_t>(linear.weights.num_inputs), "x must have num_inputs columns");
    require(norm.shape(0) == x.shape(1), "the norm's weight must have one number a column of x");
  }

  void norm_linear(const float* x, int rows, const float* norm, float eps, const LinearWeights& w, float* out) {
    float* normed = static_cast<float*>(normed_.reserve(sizeof(float) * rows * w.num_inputs));
    table_->rms_norm(pool_, x, norm, eps, rows, w.num_inputs, normed);
    run_linear({&w, normed, out, rows, false, nullptr});
  }

  // [rows, num_outputs] in memory of ours, until the next call.
  const float* norm_linear_here(const float* x, int rows, const float* norm, float eps, const LinearWeights& w) {
    float* out = static_cast<float*>(wide_.reserve(sizeof(float) * rows * w.num_outputs));
    norm_linear(x, rows, norm, eps, w, out);
    return out;
  }

  void run_linear(LinearArgs args) {
    args.scratch = scratch_.reserve(table_->linear_scratch_bytes(*args.weights, args.num_rows));
    table_->linear(pool_, args);
  }

  ThreadPool pool_;
  const KernelTable* table_ = nullptr;
  Buffer scratch_, normed_, wide_, inner_;
  std::mutex mutex_;  // one caller at a time: the pool and the scratch memory are shared
};

}  // namespace

NB_MODULE(_native, m) {
  m.def("supported_instruction_sets", [] {
    nb::list names;
    for (const KernelTable* table : supported_tables()) names.append(table->name);
    return names;
  });
  nb::class_<Linear>(m, "Linear")
      .def_prop_ro("num_outputs", [](const Linear& l) { return l.weights.num_outputs; })
      .def_prop_ro("num_inputs", [](const Linear& l) { return l.weights.num_inputs; })
      .def_prop_ro("num_bytes", [](const Linear& l) { return l.num_bytes; })
      .def_prop_ro("weights_dtype", [](const Linear& l) { return name_of(l.weights.dtype); });
  nb::class_<KVView>(m, "KVView");
  nb::class_<BatchView>(m, "BatchView");
  m.def("make_batch_view", &make_batch_view, nb::arg("query_start"), nb::arg("start_position"), nb::arg("block_table"));
  m.def("make_kv_view", &make_kv_view, nb::arg("pool").noconvert(), nb::arg("block_bytes"), nb::arg("layer_offset"), nb::arg("block_size"),
        nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("kv_format"));
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<int, const std::string&, int>(), nb::arg("num_threads"), nb::arg("instruction_set"), nb::arg("spin_pauses"))
      .def_prop_ro("instruction_set", &Kernels::instruction_set)
      .def_prop_ro("num_threads", &Kernels::num_threads)
      .def("pack_linear", &Kernels::pack, nb::arg("weight"), nb::arg("bias").none(), nb::arg("weights_dtype"))
      .def("pack_blocks", &Kernels::pack_rows_of_blocks, nb::arg("blocks"), nb::arg("bias").none(), nb::arg("kind"))
      .def("linear", &Kernels::linear, nb::arg("x"), nb::arg("weight"), nb::arg("out").noconvert(), nb::arg("accumulate"))
      .def("embedding", &Kernels::embedding, nb::arg("table"), nb::arg("token_ids"), nb::arg("out").noconvert())
      .def("rms_norm", &Kernels::rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out").noconvert())
      .def("silu_mul", &Kernels::silu_mul, nb::arg("gate_up"), nb::arg("out").noconvert())
      .def("rope_write", &Kernels::rope_write, nb::arg("qkv"), nb::arg("batch"), nb::arg("cos"), nb::arg("sin"), nb::arg("kv"),
           nb::arg("out_q").noconvert(), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("norm_eps"))
      .def("attention_input", &Kernels::attention_input, nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("qkv"), nb::arg("batch"),
           nb::arg("cos"), nb::arg("sin"), nb::arg("kv"), nb::arg("out_q").noconvert(), nb::arg("q_norm").none(), nb::arg("k_norm").none())
      .def("norm_linear", &Kernels::norm_linear_into, nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("weight"),
           nb::arg("out").noconvert())
      .def("gated_mlp", &Kernels::gated_mlp, nb::arg("hidden").noconvert(), nb::arg("norm"), nb::arg("eps"), nb::arg("gate_up"), nb::arg("down"))
      .def("paged_attention", &Kernels::paged_attention, nb::arg("q"), nb::arg("batch"), nb::arg("kv"), nb::arg("scale"),
           nb::arg("out").noconvert())
      .def("copy_blocks", &Kernels::copy_blocks, nb::arg("pool").noconvert(), nb::arg("block_bytes"), nb::arg("sources"), nb::arg("targets"));
}
