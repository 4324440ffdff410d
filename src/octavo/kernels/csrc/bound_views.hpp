// What Python holds of a cache and of a step: a layer's view of the pool, a step's sequences; checked when made or first used.
#pragma once
#include "binding.hpp"

namespace octavo {

inline KVFormat kv_format(const std::string& name) {
  KVFormat format;
  if (kv_format_of(name.c_str(), &format)) return format;
  std::string known;
  for (const char* each : kKVFormatNames) known += known.empty() ? each : std::string(", ") + each;
  throw std::invalid_argument("KV format '" + name + "' is not one of " + known);
}

// Where one layer lies in the pool; made once, used at each step. Keeps the pool and the scales alive.
struct KVView {
  U1 pool;
  std::optional<CF2> k_scales, v_scales, k_means;
  std::optional<CF3> k_feedback;
  KVLayerArgs args;
};

inline std::unique_ptr<KVView> make_kv_view(U1 pool, int64_t block_bytes, int64_t layer_offset, int block_size, int num_kv_heads,
                                     int head_dim, const std::string& format, const std::string& kind,
                                     std::optional<CF2> k_scales, std::optional<CF2> v_scales, std::optional<CF2> k_means, bool is_turned,
                                     std::optional<CF3> k_feedback, int64_t tail_offset) {
  require(kind == "pair" || kind == "latent", "kind must be pair or latent");
  const bool is_latent = kind == "latent";
  require(block_size >= 16 && block_size % 16 == 0 && block_size <= 256, "block_size must be a multiple of 16 up to 256");
  require(head_dim >= 16 && head_dim % 16 == 0 && head_dim <= (is_latent ? 640 : 256),
          "head_dim must be a multiple of 16 up to 256; that of a latent up to 640");
  require(num_kv_heads >= 1 && (!is_latent || num_kv_heads == 1), "num_kv_heads must be at least 1; that of a latent 1");
  auto view = std::make_unique<KVView>();
  const KVFormat f = kv_format(format);
  require(head_dim % kv_dim_step(f) == 0, "head_dim must be a multiple of 32 for this KV format");
  view->args = {pool.data(), block_bytes, layer_offset, block_size, num_kv_heads, head_dim, f, nullptr, nullptr, is_latent, tail_offset,
                is_turned && !has_tail(f), is_turned, nullptr, nullptr};
  require((tail_offset >= 0) == has_tail(f), "a layer has a tail where its KV format quantises K by whole tiles, and only there");
  require(!(is_latent && has_tail(f)), "latents cannot be kept in a KV format that has tails");
  require(!(is_turned && is_latent), "latents are not turned");
  const int64_t tile_bytes = k_tile_bytes(f, head_dim) + (is_latent ? 0 : v_tile_bytes(f, head_dim));
  const int64_t layer_bytes = tile_bytes * num_kv_heads * (block_size / 16);
  require(layer_offset >= 0 && layer_offset + layer_bytes <= block_bytes, "the layer does not lie inside a block");
  const int64_t tail_bytes = has_tail(f) ? k_tile_bytes(KVFormat::bf16, head_dim) * num_kv_heads * (block_size / 16) : 0;
  require(tail_offset + tail_bytes <= block_bytes, "the layer's tail does not lie inside a block");
  require(pool.shape(0) % static_cast<size_t>(block_bytes) == 0, "the pool must be a whole number of blocks");
  require(k_scales.has_value() == v_scales.has_value(), "k_scales and v_scales come together");
  if (k_scales) {
    require((is_fp8(f) || f == KVFormat::int8) && !is_latent, "scales of channels go with fp8 formats, int8, and pairs of K and V");
    for (const CF2& scales : {*k_scales, *v_scales})
      require(scales.shape(0) == static_cast<size_t>(num_kv_heads) && scales.shape(1) == static_cast<size_t>(head_dim),
              "scales must be [num_kv_heads, head_dim]");
    view->args.k_scales = k_scales->data();
    view->args.v_scales = v_scales->data();
  }
  if (k_means) {
    require(k_scales.has_value(), "means of K go with scales");
    require(k_means->shape(0) == static_cast<size_t>(num_kv_heads) && k_means->shape(1) == static_cast<size_t>(head_dim),
            "means must be [num_kv_heads, head_dim]");
    view->args.k_means = k_means->data();
  }
  view->k_means = std::move(k_means);
  if (k_feedback) {
    const size_t dim = static_cast<size_t>(head_dim);
    require(is_fp8(f) && !is_latent, "feedback of K goes with fp8 formats, and pairs of K and V");
    require(k_feedback->shape(0) == static_cast<size_t>(num_kv_heads) && k_feedback->shape(1) == dim && k_feedback->shape(2) == dim,
            "feedback must be [num_kv_heads, head_dim, head_dim]");
    view->args.k_feedback = k_feedback->data();
  }
  view->k_feedback = std::move(k_feedback);
  view->k_scales = std::move(k_scales);
  view->v_scales = std::move(v_scales);
  view->pool = std::move(pool);
  return view;
}

// One step's sequences in one KV group; made once a step, used at each layer. Keeps the arrays alive.
struct BatchView {
  CI1 query_start, start_slot, start_position;
  CI2 block_table;
  std::optional<CI2> tail_table;
  BatchArgs args;
  size_t num_tokens;
  int64_t num_positions;  // one more than the last position in a text
  // What the tables were checked against last; the layers of a group have it in common.
  int64_t checked_blocks = -1;
  int checked_block_size = 0;
};

inline std::unique_ptr<BatchView> make_batch_view(CI1 query_start, CI1 start_slot, CI1 start_position, CI2 block_table,
                                                  std::optional<CI2> tail_table) {
  const size_t n = start_slot.shape(0);
  require(query_start.shape(0) == n + 1 && start_position.shape(0) == n && block_table.shape(0) == n,
          "the batch's arrays disagree in the number of sequences");
  require(!tail_table || (tail_table->shape(0) == n && tail_table->shape(1) == block_table.shape(1)),
          "the tail's table must have the shape of the other");
  require(n > 0 && query_start.data()[0] == 0 && query_start.data()[n] >= 0, "query_start must run from 0 to the number of rows");
  auto view = std::make_unique<BatchView>();
  view->args = {query_start.data(), start_slot.data(), block_table.data(), static_cast<int>(n),
                static_cast<int>(block_table.shape(1)), start_position.data(), tail_table ? tail_table->data() : nullptr};
  view->num_tokens = static_cast<size_t>(query_start.data()[n]);
  view->num_positions = 0;
  for (size_t i = 0; i < n; i++) {
    const int64_t rows = int64_t{query_start.data()[i + 1]} - query_start.data()[i];
    require(rows >= 0 && start_slot.data()[i] >= 0 && start_position.data()[i] >= 0,
            "query_start must ascend and positions must not be negative");
    const int64_t end = start_position.data()[i] + rows;
    if (end > view->num_positions) view->num_positions = end;
  }
  view->query_start = std::move(query_start);
  view->start_slot = std::move(start_slot);
  view->start_position = std::move(start_position);
  view->block_table = std::move(block_table);
  view->tail_table = std::move(tail_table);
  return view;
}

// No kernel reads or writes outside the pool or the tables, whatever the caller hands in.
inline void check_tables(BatchView& batch, const KVView& kv) {
  require(!has_tail(kv.args.format) || batch.tail_table, "the layer has a tail, and the batch no table for it");
  const int64_t num_blocks = static_cast<int64_t>(kv.pool.shape(0)) / kv.args.block_bytes;
  if (batch.checked_blocks == num_blocks && batch.checked_block_size == kv.args.block_size) return;
  const BatchArgs& args = batch.args;
  for (int i = 0; i < args.num_sequences; i++) {
    const int64_t end = int64_t{args.start_position[i]} + args.query_start[i + 1] - args.query_start[i];
    const int64_t used = (end + kv.args.block_size - 1) / kv.args.block_size;
    require(used <= args.max_blocks, "the block table is too short for the positions");
    for (int64_t b = 0; b < used; b++) {
      for (const int32_t* table : {args.block_table, args.tail_table}) {
        if (!table) continue;
        const int32_t id = table[int64_t{i} * args.max_blocks + b];
        require(id >= 0 && id < num_blocks, "a block id is outside the pool");
      }
    }
  }
  batch.checked_blocks = num_blocks;
  batch.checked_block_size = kv.args.block_size;
}

// All but qkv.
inline RopeWriteArgs rope_args(BatchView& batch, const CF2& cos, const CF2& sin, const KVView& kv, const F3& out_q,
                               const std::optional<CF1>& q_norm, const std::optional<CF1>& k_norm, float norm_eps) {
  const size_t dim = static_cast<size_t>(kv.args.head_dim);
  require(!kv.args.is_latent, "rope_write writes pairs of K and V; use latent_write for latents");
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

inline size_t qkv_width(const RopeWriteArgs& args) {
  return (static_cast<size_t>(args.num_heads) + 2 * static_cast<size_t>(args.kv.num_kv_heads)) * static_cast<size_t>(args.kv.head_dim);
}

// All but out, v_dim and what is optional.
inline AttentionArgs query_args(const CF3& q, BatchView& batch, const KVView& kv, float scale) {
  const KVLayerArgs& layer = kv.args;
  require(q.shape(0) == batch.num_tokens, "query_start must run from 0 to the number of rows");
  check_tables(batch, kv);
  require(q.shape(2) == static_cast<size_t>(layer.head_dim), "q must be [tokens, heads, head_dim]");
  require(q.shape(1) >= 1 && q.shape(1) % static_cast<size_t>(layer.num_kv_heads) == 0, "the heads must be a multiple of the KV heads");
  AttentionArgs args{};
  args.q = q.data();
  args.batch = batch.args;
  args.kv = layer;
  args.num_tokens = static_cast<int>(q.shape(0));
  args.num_heads = static_cast<int>(q.shape(1));
  args.scale = scale;
  return args;
}

inline AttentionArgs attention_args(const CF3& q, BatchView& batch, const KVView& kv, float scale, const F3& out, int v_dim) {
  AttentionArgs args = query_args(q, batch, kv, scale);
  require(out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) && out.shape(2) == static_cast<size_t>(v_dim),
          "out must have the shape of q, with as many numbers a head as a value has");
  args.out = out.data();
  args.v_dim = v_dim;
  return args;
}

// Of the rows of a sequence from first_row on.
inline MassArgs mass_args(const CF3& q, BatchView& batch, const KVView& kv, float scale, int sequence, int first_row, const L2& mass) {
  MassArgs args{};
  args.attention = query_args(q, batch, kv, scale);
  const BatchArgs& sequences = batch.args;
  require(sequence >= 0 && sequence < sequences.num_sequences, "there is no such sequence in the batch");
  const int num_rows = sequences.query_start[sequence + 1] - sequences.query_start[sequence];
  require(first_row >= 0 && first_row <= num_rows, "first_row must be one of the sequence's rows, or their number");
  require(mass.shape(0) == static_cast<size_t>(kv.args.num_kv_heads) && mass.shape(1) < size_t{1} << 31 &&
              mass.shape(1) >= static_cast<size_t>(sequences.start_position[sequence] + num_rows),
          "mass must be [num_kv_heads, at least the slots that the last row sees]");
  args.sequence = sequence;
  args.first_row = first_row;
  args.num_rows = num_rows - first_row;
  args.mass = mass.data();
  args.num_slots = static_cast<int>(mass.shape(1));
  return args;
}

}  // namespace octavo
