// The Python binding: checks shapes, owns scratch memory, releases the GIL. It does not compute.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <mutex>

#include "binding.hpp"
#include "dispatch.hpp"

namespace nb = nanobind;
using namespace octavo;

namespace {

Activation activation_of(const std::string& name) {
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "sigmoid") return Activation::sigmoid;
  throw std::invalid_argument("activation '" + name + "' is not one of relu, gelu, gelu_tanh, sigmoid");
}

Gate gate_of(const std::string& name) {
  if (name == "gelu") return Gate::gelu;
  if (name == "gelu_tanh") return Gate::gelu_tanh;
  if (name == "clamped_swiglu") return Gate::clamped_swiglu;
  throw std::invalid_argument("gated activation '" + name + "' is not one of gelu, gelu_tanh, clamped_swiglu");
}

bool same_shape(const CF2& x, const F2& out) { return x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1); }

KVFormat kv_format(const std::string& name) {
  KVFormat format;
  if (kv_format_of(name.c_str(), &format)) return format;
  std::string known;
  for (const char* each : kKVFormatNames) known += known.empty() ? each : std::string(", ") + each;
  throw std::invalid_argument("KV format '" + name + "' is not one of " + known);
}

// One step's sequences; the arrays are borrowed for the time of a call.
BatchArgs batch_args(const CI1& query_start, const CI1& start_position, const CI2& block_table, size_t num_tokens) {
  const size_t n = start_position.shape(0);
  require(query_start.shape(0) == n + 1 && block_table.shape(0) == n, "the batch's arrays disagree in the number of sequences");
  require(n > 0 && query_start.data()[0] == 0 && static_cast<size_t>(query_start.data()[n]) == num_tokens,
          "query_start must run from 0 to the number of rows");
  return {query_start.data(), start_position.data(), block_table.data(), static_cast<int>(n), static_cast<int>(block_table.shape(1))};
}

// Where one layer lies in the pool; made once, used at each step. Keeps the pool and the scales alive.
struct KVView {
  U1 pool;
  std::optional<CF2> k_scales, v_scales;
  KVLayerArgs args;
};

std::unique_ptr<KVView> make_kv_view(U1 pool, int64_t block_bytes, int64_t layer_offset, int block_size, int num_kv_heads,
                                     int head_dim, const std::string& format, const std::string& kind,
                                     std::optional<CF2> k_scales, std::optional<CF2> v_scales) {
  require(kind == "pair" || kind == "latent", "kind must be pair or latent");
  const bool is_latent = kind == "latent";
  require(block_size >= 16 && block_size % 16 == 0 && block_size <= 256, "block_size must be a multiple of 16 up to 256");
  require(head_dim >= 16 && head_dim % 16 == 0 && head_dim <= (is_latent ? 640 : 256),
          "head_dim must be a multiple of 16 up to 256; that of a latent up to 640");
  require(num_kv_heads >= 1 && (!is_latent || num_kv_heads == 1), "num_kv_heads must be at least 1; that of a latent 1");
  auto view = std::make_unique<KVView>();
  const KVFormat f = kv_format(format);
  require(head_dim % kv_dim_step(f) == 0, "head_dim must be a multiple of 32 for this KV format");
  view->args = {pool.data(), block_bytes, layer_offset, block_size, num_kv_heads, head_dim, f, nullptr, nullptr, is_latent};
  const int64_t tile_bytes = k_tile_bytes(f, head_dim) + (is_latent ? 0 : v_tile_bytes(f, head_dim));
  const int64_t layer_bytes = tile_bytes * num_kv_heads * (block_size / 16);
  require(layer_offset >= 0 && layer_offset + layer_bytes <= block_bytes, "the layer does not lie inside a block");
  require(pool.shape(0) % static_cast<size_t>(block_bytes) == 0, "the pool must be a whole number of blocks");
  require(k_scales.has_value() == v_scales.has_value(), "k_scales and v_scales come together");
  if (k_scales) {
    require(is_fp8(f) && !is_latent, "scales of channels go with fp8 formats and pairs of K and V");
    for (const CF2& scales : {*k_scales, *v_scales})
      require(scales.shape(0) == static_cast<size_t>(num_kv_heads) && scales.shape(1) == static_cast<size_t>(head_dim),
              "scales must be [num_kv_heads, head_dim]");
    view->args.k_scales = k_scales->data();
    view->args.v_scales = v_scales->data();
  }
  view->k_scales = std::move(k_scales);
  view->v_scales = std::move(v_scales);
  view->pool = std::move(pool);
  return view;
}

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
    args.scratch = scratch_.reserve(table_->linear_scratch_bytes(w, args.num_rows));
    table_->linear(pool_, args);
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

  void rope_write(const CF2& qkv, const CI1& query_start, const CI1& start_position, const CI2& block_table, const CF2& cos,
                  const CF2& sin, const KVView& kv, const F3& out_q, const std::optional<CF1>& q_norm,
                  const std::optional<CF1>& k_norm, float norm_eps) {
    const KVLayerArgs& layer = kv.args;
    const size_t tokens = qkv.shape(0), heads = out_q.shape(1), dim = static_cast<size_t>(layer.head_dim);
    require(out_q.shape(0) == tokens && out_q.shape(2) == dim, "out_q must be [tokens, heads, head_dim]");
    require(qkv.shape(1) == (heads + 2 * static_cast<size_t>(layer.num_kv_heads)) * dim, "qkv must be [tokens, (heads + 2 * kv heads) * head_dim]");
    require(!layer.is_latent, "rope_write writes pairs of K and V; use latent_write for latents");
    require(sin.shape(0) == cos.shape(0) && sin.shape(1) == cos.shape(1) && 2 * cos.shape(1) <= dim, "cos and sin must agree and fit head_dim");
    require(!q_norm || q_norm->shape(0) == dim, "q_norm must be [head_dim]");
    require(!k_norm || k_norm->shape(0) == dim, "k_norm must be [head_dim]");
    RopeWriteArgs args{qkv.data(), batch_args(query_start, start_position, block_table, tokens), cos.data(), sin.data(),
                       static_cast<int>(cos.shape(1)), layer, out_q.data(), static_cast<int>(tokens), static_cast<int>(heads),
                       q_norm ? q_norm->data() : nullptr, k_norm ? k_norm->data() : nullptr, norm_eps};
    check_positions(args.batch, layer, cos.shape(0), kv.pool.shape(0));
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->rope_write(pool_, args);
  }

  void latent_write(const CF2& latent, const CI1& query_start, const CI1& start_position, const CI2& block_table, const KVView& kv) {
    const KVLayerArgs& layer = kv.args;
    const size_t tokens = latent.shape(0);
    require(layer.is_latent, "latents are written to a latent layer");
    require(latent.shape(1) == static_cast<size_t>(layer.head_dim), "latent must be [tokens, head_dim]");
    LatentWriteArgs args{latent.data(), batch_args(query_start, start_position, block_table, tokens), layer, static_cast<int>(tokens)};
    check_positions(args.batch, layer, SIZE_MAX, kv.pool.shape(0));
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    table_->latent_write(pool_, args);
  }

  void paged_attention(const CF3& q, const CI1& query_start, const CI1& start_position, const CI2& block_table, const KVView& kv,
                       float scale, const F3& out, int window, float softcap, const std::optional<CF1>& sinks) {
    require(!kv.args.is_latent, "paged_attention reads pairs of K and V; use latent_attention for latents");
    require(window >= 0, "window must be 0 (all keys) or more");
    require(softcap >= 0.f, "softcap must be 0 (none) or more");
    require(!sinks || sinks->shape(0) == q.shape(1), "sinks must be [num_heads]");
    AttentionArgs args = attention_args(q, query_start, start_position, block_table, kv, scale, out, kv.args.head_dim);
    args.window = window;
    args.softcap = softcap;
    args.sinks = sinks ? sinks->data() : nullptr;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.scratch = scratch_.reserve(table_->attention_scratch_bytes(args, pool_.num_threads()));
    table_->paged_attention(pool_, args);
  }

  void latent_attention(const CF3& q, const CI1& query_start, const CI1& start_position, const CI2& block_table, const KVView& kv,
                        int rank, float scale, const F3& out) {
    require(kv.args.is_latent, "latent_attention reads latents; use paged_attention for pairs of K and V");
    require(rank >= 16 && rank % 16 == 0 && rank <= kv.args.head_dim, "rank must be a multiple of 16 up to head_dim");
    AttentionArgs args = attention_args(q, query_start, start_position, block_table, kv, scale, out, rank);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    args.scratch = scratch_.reserve(table_->latent_scratch_bytes(args, pool_.num_threads()));
    table_->latent_attention(pool_, args);
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
  static AttentionArgs attention_args(const CF3& q, const CI1& query_start, const CI1& start_position, const CI2& block_table,
                                      const KVView& kv, float scale, const F3& out, int v_dim) {
    const KVLayerArgs& layer = kv.args;
    require(q.shape(2) == static_cast<size_t>(layer.head_dim), "q must be [tokens, heads, head_dim]");
    require(q.shape(1) >= 1 && q.shape(1) % static_cast<size_t>(layer.num_kv_heads) == 0, "the heads must be a multiple of the KV heads");
    require(out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) && out.shape(2) == static_cast<size_t>(v_dim),
            "out must have the shape of q, with as many numbers a head as a value has");
    AttentionArgs args{};
    args.q = q.data();
    args.batch = batch_args(query_start, start_position, block_table, q.shape(0));
    args.kv = layer;
    args.out = out.data();
    args.num_tokens = static_cast<int>(q.shape(0));
    args.num_heads = static_cast<int>(q.shape(1));
    args.v_dim = v_dim;
    args.scale = scale;
    check_positions(args.batch, layer, SIZE_MAX, kv.pool.shape(0));
    return args;
  }

  // No kernel reads or writes outside the pool, the tables or the rope table, whatever the caller hands in.
  static void check_positions(const BatchArgs& batch, const KVLayerArgs& layer, size_t max_positions, size_t pool_bytes) {
    const int64_t num_blocks = static_cast<int64_t>(pool_bytes / static_cast<size_t>(layer.block_bytes));
    for (int i = 0; i < batch.num_sequences; i++) {
      const int64_t rows = int64_t{batch.query_start[i + 1]} - batch.query_start[i], end = batch.start_position[i] + rows;
      require(rows >= 0 && batch.start_position[i] >= 0, "query_start must ascend and positions must not be negative");
      require(static_cast<size_t>(end) <= max_positions, "a position is outside the rope table");
      const int64_t used = (end + layer.block_size - 1) / layer.block_size;
      require(used <= batch.max_blocks, "the block table is too short for the positions");
      for (int64_t b = 0; b < used; b++) {
        const int32_t id = batch.block_table[int64_t{i} * batch.max_blocks + b];
        require(id >= 0 && id < num_blocks, "a block id is outside the pool");
      }
    }
  }

  ThreadPool pool_;
  const KernelTable* table_ = nullptr;
  Buffer scratch_;
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
  m.def("make_kv_view", &make_kv_view, nb::arg("pool").noconvert(), nb::arg("block_bytes"), nb::arg("layer_offset"), nb::arg("block_size"),
        nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("kv_format"), nb::arg("kind"), nb::arg("k_scales").none(), nb::arg("v_scales").none());
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
      .def("layer_norm", &Kernels::layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"), nb::arg("out").noconvert())
      .def("activation", &Kernels::activation, nb::arg("x"), nb::arg("kind"), nb::arg("out").noconvert())
      .def("gated_activation", &Kernels::gated_activation, nb::arg("gate_up"), nb::arg("kind"), nb::arg("limit"), nb::arg("out").noconvert())
      .def("softmax", &Kernels::softmax, nb::arg("x"), nb::arg("out").noconvert())
      .def("soft_cap", &Kernels::soft_cap, nb::arg("x"), nb::arg("cap"), nb::arg("out").noconvert())
      .def("rotate", &Kernels::rotate, nb::arg("heads").noconvert(), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"), nb::arg("first"))
      .def("rope_write", &Kernels::rope_write, nb::arg("qkv"), nb::arg("query_start"), nb::arg("start_position"),
           nb::arg("block_table"), nb::arg("cos"), nb::arg("sin"), nb::arg("kv"), nb::arg("out_q").noconvert(),
           nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("norm_eps"))
      .def("paged_attention", &Kernels::paged_attention, nb::arg("q"), nb::arg("query_start"), nb::arg("start_position"),
           nb::arg("block_table"), nb::arg("kv"), nb::arg("scale"), nb::arg("out").noconvert(), nb::arg("window"),
           nb::arg("softcap"), nb::arg("sinks").none())
      .def("latent_write", &Kernels::latent_write, nb::arg("latent"), nb::arg("query_start"), nb::arg("start_position"),
           nb::arg("block_table"), nb::arg("kv"))
      .def("latent_attention", &Kernels::latent_attention, nb::arg("q"), nb::arg("query_start"), nb::arg("start_position"),
           nb::arg("block_table"), nb::arg("kv"), nb::arg("rank"), nb::arg("scale"), nb::arg("out").noconvert())
      .def("copy_blocks", &Kernels::copy_blocks, nb::arg("pool").noconvert(), nb::arg("block_bytes"), nb::arg("sources"), nb::arg("targets"));
}
