// The Python binding: checks shapes, owns scratch memory, releases the GIL. It does not compute.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "pack_groups.hpp"
#include "pack_linear.hpp"

namespace nb = nanobind;
using namespace octavo;

namespace {

using CF1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CF2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CF3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using F3 = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using CI1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CI2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CU2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using U1 = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// 64-byte aligned memory that grows and is never initialised.
class Buffer {
 public:
  explicit Buffer(size_t bytes = 0) { reserve(bytes); }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

struct Linear {
  Buffer packed, bias;
  LinearWeights weights{};
  size_t num_bytes = 0;
};

WeightsDtype weights_dtype(const std::string& name) {
  if (name == "f32") return WeightsDtype::f32;
  if (name == "bf16") return WeightsDtype::bf16;
  if (name == "int8") return WeightsDtype::int8;
  if (name == "int4") return WeightsDtype::int4;
  throw std::invalid_argument("weights dtype '" + name + "' is not one of f32, bf16, int8, int4");
}

const char* name_of(WeightsDtype dtype) {
  switch (dtype) {
    case WeightsDtype::f32: return "f32";
    case WeightsDtype::bf16: return "bf16";
    case WeightsDtype::int8: return "int8";
    default: return "int4";
  }
}

BlockKind block_kind(const std::string& name) {
  if (name == "q8_0") return BlockKind::q8_0;
  if (name == "q4_0") return BlockKind::q4_0;
  if (name == "q4_1") return BlockKind::q4_1;
  throw std::invalid_argument("blocks of '" + name + "' are not one of q8_0, q4_0, q4_1");
}

// Memory for a matrix and its bias, which is filled in.
std::unique_ptr<Linear> new_linear(int num_outputs, int num_inputs, WeightsDtype type, const std::optional<CF1>& bias) {
  require(num_outputs >= 1 && num_inputs >= 1, "a weight matrix must not be empty");
  auto linear = std::make_unique<Linear>();
  linear->num_bytes = type >= WeightsDtype::int8 ? packed_groups_bytes(num_outputs, num_inputs, type)
                                                 : packed_linear_bytes(num_outputs, num_inputs, type);
  linear->weights = {linear->packed.reserve(linear->num_bytes), nullptr, num_outputs, num_inputs, type};
  if (bias) {
    require(bias->shape(0) == static_cast<size_t>(num_outputs), "the bias must have one number an output");
    const size_t padded = static_cast<size_t>(num_outputs + 15) / 16 * 16;
    float* to = static_cast<float*>(linear->bias.reserve(padded * 4));
    std::memset(to, 0, padded * 4);
    std::memcpy(to, bias->data(), static_cast<size_t>(num_outputs) * 4);
    linear->weights.bias = to;
    linear->num_bytes += padded * 4;
  }
  return linear;
}

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
