// What crosses from the Python binding into the kernels: plain structs, and one table of functions per instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kv_format.hpp"
#include "thread_pool.hpp"

namespace octavo {

enum class WeightsDtype : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3, int4_min = 4, int4_whole_min = 5 };

enum class Activation : int { relu = 0, gelu = 1, gelu_tanh = 2, sigmoid = 3 };
enum class Gate : int { gelu = 0, gelu_tanh = 1, clamped_swiglu = 2, silu = 3 };  // silu: `silu_mul`

// Weights in panels of 16 outputs, inputs padded with zeros.
// f32: [panel][num_inputs][16]; bf16: [panel][num_inputs_padded / 2][16][2]; others: weight_groups.hpp. bias: [num_panels * 16], zeros where none.
struct LinearWeights {
  const void* weights;
  const float* bias;  // null: none
  int num_outputs, num_inputs;
  WeightsDtype dtype;
  bool ordinary_scales = false;          // of groups: pack_groups.hpp
  const float* minimum_units = nullptr;  // [num_outputs padded to 16], of int4_whole_min: weight_groups.hpp
  int minimum_bits = 0;                  // of the largest magnitude of its minima, in their units
};

struct LinearArgs {
  const LinearWeights* weights;
  const float* x;  // [num_rows, num_inputs]
  float* out;      // [num_rows, num_outputs], or half as many where gated
  int num_rows;
  bool accumulate;
  void* scratch;   // linear_scratch_bytes(weights, num_rows, threads of the pool) bytes, 64-byte aligned
  bool gated;      // out = silu_mul of what the first half of the outputs would be and the second; where linear_gates says so
};

struct RotateArgs {
  float* heads;              // [num_rows, num_heads, head_dim], rotated in place
  const int32_t* positions;  // [num_rows]
  const float *cos, *sin;    // [max_positions, half]
  int num_rows, num_heads, head_dim, half, first;
};

struct KVLayerArgs {
  uint8_t* pool;
  int64_t block_bytes, layer_offset;
  int block_size, num_kv_heads, head_dim;
  KVFormat format;
  const float *k_scales, *v_scales;  // [num_kv_heads, head_dim] or null: what is stored is divided by them
  bool is_latent;  // one vector a token, which is K and, as far as its first numbers go, V
  int64_t tail_offset;  // in blocks of the tail's table, where the format has a tail; else -1
  bool turns_k, turns_v;  // hadamard.hpp: before they are rounded; so q is turned, or what attention gives
  const float* k_means;     // [num_kv_heads, head_dim] or null: taken from K first; scores are less by the same number
  const float* k_feedback;  // [num_kv_heads, head_dim, head_dim] or null: of fp8 formats (kv_formats/feedback.py)
};

struct BatchArgs {
  const int32_t* query_start;     // [num_sequences + 1]
  const int32_t* start_position;  // [num_sequences], counted in slots: less what a sequence has dropped
  const int32_t* block_table;     // [num_sequences, max_blocks]
  int num_sequences, max_blocks;
  const int32_t* text_position;   // [num_sequences], for rotations: nothing is less for being dropped
  const int32_t* tail_table;      // [num_sequences, max_blocks] or null
};

struct RopeWriteArgs {
  const float* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], or of some of them ...
  BatchArgs batch;
  const float *cos, *sin;  // [max_positions, half_rotary_dim]
  int half_rotary_dim;
  KVLayerArgs kv;
  float* out_q;  // [num_tokens, num_heads, head_dim]
  int num_tokens, num_heads;
  const float *q_norm, *k_norm;  // [head_dim] or null
  float norm_eps;
  int first_row = 0;  // ... of which this is the first
};

struct LatentWriteArgs {
  const float* latent;  // [num_tokens, head_dim]
  BatchArgs batch;
  KVLayerArgs kv;
  int num_tokens;
};

// Of paged_attention (v_dim is head_dim) and of latent_attention (v_dim is rank: the first numbers of a latent).
struct AttentionArgs {
  const float* q;  // [num_tokens, num_heads, head_dim]
  BatchArgs batch;
  KVLayerArgs kv;
  float* out;  // [num_tokens, num_heads, v_dim]; may be q, where v_dim is head_dim
  int num_tokens, num_heads, v_dim;
  float scale;
  int window;          // keys that a row sees at most; 0: all
  float softcap;       // 0: none
  const float* sinks;  // [num_heads] or null
  void* scratch;       // attention_scratch_bytes or latent_scratch_bytes, 64-byte aligned
};

// The rows [first_row, first_row + num_rows) of one sequence of a batch; of attention: q, batch, kv, num_heads, scale, scratch.
struct MassArgs {
  AttentionArgs attention;
  int sequence, first_row, num_rows;
  int64_t* mass;  // [num_kv_heads, num_slots], added to
  int num_slots;  // at least those that the last row sees
};

struct DrawSettings {
  double temperature, top_k, top_p, min_p, number;  // temperature 0: the highest; number: from [0, 1)
};

struct DrawArgs {
  const float* logits;           // [any number of rows, vocab_size]
  const int32_t* rows;           // [num_draws]: which row each draws from
  const DrawSettings* settings;  // [num_draws]
  int32_t* out;                  // [num_draws], ids; -1: nothing can be drawn
  int num_draws, vocab_size;
  bool must_be_finite;
  void* scratch;  // draw_scratch_bytes(vocab_size, num_threads) bytes, 64-byte aligned
};

struct KernelTable {
  const char* name;
  size_t (*linear_scratch_bytes)(const LinearWeights&, int num_rows, int num_threads);
  void (*linear)(ThreadPool&, const LinearArgs&);
  bool (*linear_gates)(const LinearWeights&, int num_rows);
  void (*embedding)(ThreadPool&, const LinearWeights&, const int32_t* token_ids, int num_rows, float* out);
  void (*rms_norm)(ThreadPool&, const float* x, const float* weight, float eps, int num_rows, int width, float* out, bool accumulate);
  void (*silu_mul)(ThreadPool&, const float* gate_up, int num_rows, int width, float* out);
  void (*layer_norm)(ThreadPool&, const float* x, const float* weight, const float* bias, float eps, int num_rows, int width, float* out);
  void (*activation)(ThreadPool&, const float* x, Activation kind, int num_rows, int width, float* out);
  void (*gated_activation)(ThreadPool&, const float* gate_up, Gate kind, float limit, int num_rows, int width, float* out);
  void (*softmax)(ThreadPool&, const float* x, int num_rows, int width, float* out);
  void (*soft_cap)(ThreadPool&, const float* x, float cap, int num_rows, int width, float* out);
  void (*rotate)(ThreadPool&, const RotateArgs&);
  void (*ask_for_slots)(ThreadPool&, const RopeWriteArgs&, int first, int num_rows);  // fetches what rope_write will write to
  void (*rope_write)(ThreadPool&, const RopeWriteArgs&, int first, int num_rows);
  void (*finish_tiles)(ThreadPool&, const RopeWriteArgs&);  // once all rows are written
  size_t (*attention_scratch_bytes)(const AttentionArgs&, int num_threads);
  void (*paged_attention)(ThreadPool&, const AttentionArgs&);
  size_t (*mass_scratch_bytes)(const MassArgs&, int num_threads);
  void (*attention_mass)(ThreadPool&, const MassArgs&);
  void (*latent_write)(ThreadPool&, const LatentWriteArgs&);
  size_t (*latent_scratch_bytes)(const AttentionArgs&, int num_threads);
  void (*latent_attention)(ThreadPool&, const AttentionArgs&);
  size_t (*draw_scratch_bytes)(int vocab_size, int num_threads);
  void (*draw)(ThreadPool&, const DrawArgs&);
};

}  // namespace octavo
