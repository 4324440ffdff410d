// What Python holds of the kernels: packed matrices, a layer's view of the pool, a step's sequences. Checked when made.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

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
  if (name == "f32") return KVFormat::f32;
  if (name == "bf16") return KVFormat::bf16;
  throw std::invalid_argument("KV format '" + name + "' is not one of f32, bf16");
}

// Where one layer lies in the pool; made once, used at each step. Keeps the pool alive.
struct KVView {
  U1 pool;
  KVLayerArgs args;
};

std::unique_ptr<KVView> make_kv_view(U1 pool, int64_t block_bytes, int64_t layer_offset, int block_size, int num_kv_heads,
                                     int head_dim, const std::string& format) {
  require(block_size >= 16 && block_size % 16 == 0 && block_size <= 256, "block_size must be a multiple of 16 up to 256");
  require(head_dim >= 16 && head_dim % 16 == 0 && head_dim <= 256, "head_dim must be a multiple of 16 up to 256");
  require(num_kv_heads >= 1, "num_kv_heads must be at least 1");
  const KVFormat f = kv_format(format);
  const int64_t layer_bytes = int64_t{2} * block_size * num_kv_heads * head_dim * (f == KVFormat::f32 ? 4 : 2);
  require(layer_offset >= 0 && layer_offset + layer_bytes <= block_bytes, "the layer does not lie inside a block");
  require(pool.shape(0) % static_cast<size_t>(block_bytes) == 0, "the pool must be a whole number of blocks");
  auto view = std::make_unique<KVView>();
  view->args = {pool.data(), block_bytes, layer_offset, block_size, num_kv_heads, head_dim, f};
  view->pool = std::move(pool);
  return view;
}

// One step's sequences in one KV group; made once a step, used at each layer. Keeps the arrays alive.
struct BatchView {
  CI1 query_start, start_position;
  CI2 block_table;
  BatchArgs args;
  size_t num_tokens;
  int64_t num_positions;  // one more than the last position
  // What the tables were checked against last; the layers of a group have it in common.
  int64_t checked_blocks = -1;
  int checked_block_size = 0;
};

std::unique_ptr<BatchView> make_batch_view(CI1 query_start, CI1 start_position, CI2 block_table) {
  const size_t n = start_position.shape(0);
  require(query_start.shape(0) == n + 1 && block_table.shape(0) == n, "the batch's arrays disagree in the number of sequences");
  require(n > 0 && query_start.data()[0] == 0 && query_start.data()[n] >= 0, "query_start must run from 0 to the number of rows");
  auto view = std::make_unique<BatchView>();
  view->args = {query_start.data(), start_position.data(), block_table.data(), static_cast<int>(n), static_cast<int>(block_table.shape(1))};
  view->num_tokens = static_cast<size_t>(query_start.data()[n]);
  view->num_positions = 0;
  for (size_t i = 0; i < n; i++) {
    const int64_t rows = int64_t{query_start.data()[i + 1]} - query_start.data()[i];
    require(rows >= 0 && start_position.data()[i] >= 0, "query_start must ascend and positions must not be negative");
    const int64_t end = start_position.data()[i] + rows;
    if (end > view->num_positions) view->num_positions = end;
  }
  view->query_start = std::move(query_start);
  view->start_position = std::move(start_position);
  view->block_table = std::move(block_table);
  return view;
}

// No kernel reads or writes outside the pool or the tables, whatever the caller hands in.
void check_tables(BatchView& batch, const KVView& kv) {
  const int64_t num_blocks = static_cast<int64_t>(kv.pool.shape(0)) / kv.args.block_bytes;
  if (batch.checked_blocks == num_blocks && batch.checked_block_size == kv.args.block_size) return;
  const BatchArgs& args = batch.args;
  for (int i = 0; i < args.num_sequences; i++) {
    const int64_t end = int64_t{args.start_position[i]} + args.query_start[i + 1] - args.query_start[i];
    const int64_t used = (end + kv.args.block_size - 1) / kv.args.block_size;
    require(used <= args.max_blocks, "the block table is too short for the positions");
    for (int64_t b = 0; b < used; b++) {
      const int32_t id = args.block_table[int64_t{i} * args.max_blocks + b];
      require(id >= 0 && id < num_blocks, "a block id is outside the pool");
    }
  }
  batch.checked_blocks = num_blocks;
  batch.checked_block_size = kv.args.block_size;
}

}  // namespace
