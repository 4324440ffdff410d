// Per token: RMS norm of the q and k heads where the model has it, rotation, and K and V into their slot of the pool.
// Two tokens of one tile may be written by different threads: every store touches bytes of its own token only.
#include "kv_tile.hpp"
#include "ops.hpp"
#include "simd.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kPieceTokens = 16;

// x / sqrt(mean(x * x) + eps) * weight
void normalise(const float* x, const float* weight, float eps, int head_dim, float* out) {
  F16 sum = zero();
  for (int d = 0; d < head_dim; d += 16) sum = fma(load(x + d), load(x + d), sum);
  const F16 root = set1(__builtin_sqrtf(reduce_add(sum) / static_cast<float>(head_dim) + eps));
  for (int d = 0; d < head_dim; d += 16) store(out + d, mul(div(load(x + d), root), load(weight + d)));
}

// Dimensions j and j + half turn by the angle of the position; those from 2 * half on pass through.
void rotate(const float* x, const float* cos, const float* sin, int half, int head_dim, float* out) {
  int j = 0;
  for (; j + kLanes <= half; j += kLanes) {
    const F16 a = load(x + j), b = load(x + j + half), c = load(cos + j), s = load(sin + j);
    store(out + j, sub(mul(a, c), mul(b, s)));
    store(out + j + half, add(mul(b, c), mul(a, s)));
  }
  for (; j < half; j++) {
    const float a = x[j], b = x[j + half];
    out[j] = a * cos[j] - b * sin[j];
    out[j + half] = b * cos[j] + a * sin[j];
  }
  for (int d = 2 * half; d < head_dim; d++) out[d] = x[d];
}

// tile [K tile | V tile], slot 0 .. 15
void write_f32(const float* k, const float* v, int head_dim, int slot, uint8_t* tile) {
  float* k_tile = reinterpret_cast<float*>(tile);          // [head_dim][16]
  float* v_tile = k_tile + head_dim * kTileTokens;         // [16][head_dim]
  for (int d = 0; d < head_dim; d++) k_tile[d * kTileTokens + slot] = k[d];
  for (int d = 0; d < head_dim; d++) v_tile[slot * head_dim + d] = v[d];
}

void write_bf16(const float* k, const float* v, int head_dim, int slot, uint8_t* tile) {
  uint16_t* k_tile = reinterpret_cast<uint16_t*>(tile);    // [head_dim / 2][16][2]
  uint16_t* v_tile = k_tile + head_dim * kTileTokens;      // [8][head_dim][2]
  uint16_t bits[kMaxHeadDim];
  for (int d = 0; d < head_dim; d++) bits[d] = to_bf16(k[d]);
  for (int d = 0; d < head_dim; d += 2) {
    k_tile[d * kTileTokens + slot * 2] = bits[d];
    k_tile[d * kTileTokens + slot * 2 + 1] = bits[d + 1];
  }
  for (int d = 0; d < head_dim; d++) bits[d] = to_bf16(v[d]);
  uint16_t* v_row = v_tile + slot / 2 * head_dim * 2 + slot % 2;
  for (int d = 0; d < head_dim; d++) v_row[d * 2] = bits[d];
}

void write_token(const RopeWriteArgs& args, int sequence, int row, int position) {
  const KVLayerArgs& kv = args.kv;
  const int head_dim = kv.head_dim, half = args.half_rotary_dim;
  const float* cos = args.cos + static_cast<size_t>(position) * half;
  const float* sin = args.sin + static_cast<size_t>(position) * half;
  const float* q = args.qkv + static_cast<size_t>(row) * (args.num_heads + 2 * kv.num_kv_heads) * head_dim;
  const float* k = q + args.num_heads * head_dim;
  const float* v = k + kv.num_kv_heads * head_dim;
  float* out_q = args.out_q + static_cast<size_t>(row) * args.num_heads * head_dim;
  float normal[kMaxHeadDim], rotated[kMaxHeadDim];

  for (int head = 0; head < args.num_heads; head++, q += head_dim, out_q += head_dim) {
    if (args.q_norm) normalise(q, args.q_norm, args.norm_eps, head_dim, normal);
    rotate(args.q_norm ? normal : q, cos, sin, half, head_dim, out_q);
  }
  const int slot = position % kv.block_size;
  const int32_t* table = args.batch.block_table + static_cast<size_t>(sequence) * args.batch.max_blocks;
  const int32_t block_id = table[position / kv.block_size];
  for (int head = 0; head < kv.num_kv_heads; head++, k += head_dim, v += head_dim) {
    if (args.k_norm) normalise(k, args.k_norm, args.norm_eps, head_dim, normal);
    rotate(args.k_norm ? normal : k, cos, sin, half, head_dim, rotated);
    uint8_t* tile = head_tiles(kv, block_id, head) + slot / kTileTokens * 2 * half_tile_bytes(kv);
    const auto write = kv.format == KVFormat::f32 ? write_f32 : write_bf16;
    write(rotated, v, head_dim, slot % kTileTokens, tile);
  }
}

// The last sequence that begins at or before a row; of several that begin there, the last has rows.
int sequence_of(const BatchArgs& batch, int row) {
  int low = 0, high = batch.num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.query_start[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

void run_piece(void* context, int piece, int) {
  const RopeWriteArgs& args = *static_cast<const RopeWriteArgs*>(context);
  const int first = piece * kPieceTokens;
  const int end = first + kPieceTokens < args.num_tokens ? first + kPieceTokens : args.num_tokens;
  int sequence = sequence_of(args.batch, first);
  for (int row = first; row < end; row++) {
    while (row >= args.batch.query_start[sequence + 1]) sequence++;
    write_token(args, sequence, row, args.batch.start_position[sequence] + row - args.batch.query_start[sequence]);
  }
}

}  // namespace

void rope_write(ThreadPool& pool, const RopeWriteArgs& args) {
  pool.run((args.num_tokens + kPieceTokens - 1) / kPieceTokens, run_piece, const_cast<RopeWriteArgs*>(&args));
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
