// What crosses from the Python binding into the kernels: plain structs, and one table of functions per instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "thread_pool.hpp"

namespace octavo {

enum class WeightsDtype : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, int4_min = 4 };
enum class KVFormat : int { f32 = 0, bf16 = 1 };

// Weights in panels of 16 outputs, inputs padded with zeros.
// f32: [panel][num_inputs][16]; bf16: [panel][num_inputs_padded / 2][16][2]; others: weight_groups.hpp. bias: [num_panels * 16], zeros where none.
struct LinearWeights {
  const void* weights;
  const float* bias;  // null: none
  int num_outputs, num_inputs;
  WeightsDtype dtype;
};

struct LinearArgs {
  const LinearWeights* weights;
  const float* x;  // [num_rows, num_inputs]
  float* out;      // [num_rows, num_outputs]
  int num_rows;
  bool accumulate;
  void* scratch;   // linear_scratch_bytes(weights, num_rows) bytes, 64-byte aligned
};

struct KVLayerArgs {
  uint8_t* pool;
  int64_t block_bytes, layer_offset;
  int block_size, num_kv_heads, head_dim;
  KVFormat format;
};

struct BatchArgs {
  const int32_t* query_start;     // [num_sequences + 1]
  const int32_t* start_position;  // [num_sequences]
  const int32_t* block_table;     // [num_sequences, max_blocks]
  int num_sequences, max_blocks;
};

struct RopeWriteArgs {
  const float* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  BatchArgs batch;
  const float *cos, *sin;  // [max_positions, half_rotary_dim]
  int half_rotary_dim;
  KVLayerArgs kv;
  float* out_q;  // [num_tokens, num_heads, head_dim]
  int num_tokens, num_heads;
  const float *q_norm, *k_norm;  // [head_dim] or null
  float norm_eps;
};

struct AttentionArgs {
  const float* q;  // [num_tokens, num_heads, head_dim]
  BatchArgs batch;
  KVLayerArgs kv;
  float* out;  // [num_tokens, num_heads, head_dim]
  int num_tokens, num_heads;
  float scale;
  void* scratch;  // attention_scratch_bytes(args, num_threads) bytes, 64-byte aligned
};

struct KernelTable {
  const char* name;
  size_t (*linear_scratch_bytes)(const LinearWeights&, int num_rows);
  void (*linear)(ThreadPool&, const LinearArgs&);
  void (*embedding)(ThreadPool&, const LinearWeights&, const int32_t* token_ids, int num_rows, float* out);
  void (*rms_norm)(ThreadPool&, const float* x, const float* weight, float eps, int num_rows, int width, float* out);
  void (*silu_mul)(ThreadPool&, const float* gate_up, int num_rows, int width, float* out);
  void (*rope_write)(ThreadPool&, const RopeWriteArgs&);
  size_t (*attention_scratch_bytes)(const AttentionArgs&, int num_threads);
  void (*paged_attention)(ThreadPool&, const AttentionArgs&);
};

}  // namespace octavo
