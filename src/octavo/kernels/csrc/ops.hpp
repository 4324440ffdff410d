// The operations of one instruction set; each is defined in the file of its name.
#pragma once
#include "kernel_table.hpp"

namespace octavo {
namespace OCTAVO_ISA {

size_t linear_scratch_bytes(const LinearWeights& weights, int num_rows, int num_threads);
void linear(ThreadPool& pool, const LinearArgs& args);
bool linear_gates(const LinearWeights& weights, int num_rows);
void embedding(ThreadPool& pool, const LinearWeights& table, const int32_t* token_ids, int num_rows, float* out);
void rms_norm(ThreadPool& pool, const float* x, const float* weight, float eps, int num_rows, int width, float* out,
              bool accumulate);
void silu_mul(ThreadPool& pool, const float* gate_up, int num_rows, int width, float* out);
void layer_norm(ThreadPool& pool, const float* x, const float* weight, const float* bias, float eps, int num_rows, int width,
                float* out);
void activation(ThreadPool& pool, const float* x, Activation kind, int num_rows, int width, float* out);
void gated_activation(ThreadPool& pool, const float* gate_up, Gate kind, float limit, int num_rows, int width, float* out);
void softmax(ThreadPool& pool, const float* x, int num_rows, int width, float* out);
void soft_cap(ThreadPool& pool, const float* x, float cap, int num_rows, int width, float* out);
void rotate(ThreadPool& pool, const RotateArgs& args);
void ask_for_slots(ThreadPool& pool, const RopeWriteArgs& args, int first, int num_rows);
void rope_write(ThreadPool& pool, const RopeWriteArgs& args, int first, int num_rows);
void finish_tiles(ThreadPool& pool, const RopeWriteArgs& args);
size_t attention_scratch_bytes(const AttentionArgs& args, int num_threads);
void paged_attention(ThreadPool& pool, const AttentionArgs& args);
size_t mass_scratch_bytes(const MassArgs& args, int num_threads);
void attention_mass(ThreadPool& pool, const MassArgs& args);
void latent_write(ThreadPool& pool, const LatentWriteArgs& args);
size_t latent_scratch_bytes(const AttentionArgs& args, int num_threads);
void latent_attention(ThreadPool& pool, const AttentionArgs& args);
size_t draw_scratch_bytes(int vocab_size, int num_threads);
void draw(ThreadPool& pool, const DrawArgs& args);

}  // namespace OCTAVO_ISA
}  // namespace octavo
