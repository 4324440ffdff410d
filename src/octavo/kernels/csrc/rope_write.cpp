// Per token: RMS norm of the q and k heads where the model has it, rotation, and K and V into their slot of the pool.
#include "batch_rows.hpp"
#include "hadamard.hpp"
#include "kv_encode.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

constexpr int kMaxHeadDim = 256;

// x / sqrt(mean(x * x) + eps) * weight
void normalise(const float* x, const float* weight, float eps, int head_dim, float* out) {
  F16 sum = zero();
  for (int d = 0; d < head_dim; d += 16) sum = fma(load(x + d), load(x + d), sum);
  const F16 root = set1(__builtin_sqrtf(reduce_add(sum) / static_cast<float>(head_dim) + eps));
  for (int d = 0; d < head_dim; d += 16) store(out + d, mul(div(load(x + d), root), load(weight + d)));
}

void divide(const float* x, const float* by, int head_dim, float* out) {
  for (int d = 0; d < head_dim; d += 16) store(out + d, div(load(x + d), load(by + d)));
}

void subtract(const float* x, const float* what, int head_dim, float* out) {
  for (int d = 0; d < head_dim; d += 16) store(out + d, sub(load(x + d), load(what + d)));
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

// kv_formats/feedback.py, operation for operation; x becomes numbers that the format holds exactly.
template <int kFraction>
void compensate(const float* feedback, int head_dim, float* x) {
  float rounded[kMaxHeadDim], wanted[kMaxHeadDim];
  std::memcpy(wanted, x, sizeof(float) * head_dim);
  for (int j = 0; j < head_dim; j++, feedback += head_dim) {
    rounded[j] = from_fp8<kFraction>(to_fp8<kFraction>(x[j]));
    const F16 error = set1(rounded[j] - wanted[j]);
    for (int d = j / kLanes * kLanes; d < head_dim; d += kLanes)  // those up to j are not read again
      store(x + d, sub(load(x + d), mul(error, load(feedback + d))));
  }
  std::memcpy(x, rounded, sizeof(float) * head_dim);
}

void write_token(const RopeWriteArgs& args, int sequence, int row, int position) {
  const KVLayerArgs& kv = args.kv;
  const int head_dim = kv.head_dim, half = args.half_rotary_dim;
  // a sequence that has dropped tokens is stored ahead of its place in the text, and rotated by that place
  const int in_text = position + args.batch.text_position[sequence] - args.batch.start_position[sequence];
  const float* cos = args.cos + static_cast<size_t>(in_text) * half;
  const float* sin = args.sin + static_cast<size_t>(in_text) * half;
  const float* q = args.qkv + static_cast<size_t>(row - args.first_row) * (args.num_heads + 2 * kv.num_kv_heads) * head_dim;
  const float* k = q + args.num_heads * head_dim;
  const float* v = k + kv.num_kv_heads * head_dim;
  float* out_q = args.out_q + static_cast<size_t>(row) * args.num_heads * head_dim;
  float normal[kMaxHeadDim], rotated[kMaxHeadDim];

  for (int head = 0; head < args.num_heads; head++, q += head_dim, out_q += head_dim) {
    if (args.q_norm) normalise(q, args.q_norm, args.norm_eps, head_dim, normal);
    rotate(args.q_norm ? normal : q, cos, sin, half, head_dim, out_q);
  }
  const TileLayout layout = tile_layout(kv);
  const int slot = position % kTileTokens;
  for (int head = 0; head < kv.num_kv_heads; head++, k += head_dim, v += head_dim) {
    if (args.k_norm) normalise(k, args.k_norm, args.norm_eps, head_dim, normal);
    rotate(args.k_norm ? normal : k, cos, sin, half, head_dim, rotated);
    const float* value = v;
    if (kv.k_means) subtract(rotated, kv.k_means + head * head_dim, head_dim, rotated);
    if (kv.k_scales) {
      divide(rotated, kv.k_scales + head * head_dim, head_dim, rotated);
      divide(v, kv.v_scales + head * head_dim, head_dim, normal);
      value = normal;
    }
    if (kv.turns_k) turn(rotated, head_dim, 1, rotated);
    if (kv.k_feedback) {
      const float* feedback = kv.k_feedback + static_cast<size_t>(head) * head_dim * head_dim;
      (kv.format == KVFormat::fp8_e4m3 ? compensate<3> : compensate<2>)(feedback, head_dim, rotated);
    }
    if (kv.turns_v) {
      turn(value, head_dim, 1, normal);
      value = normal;
    }
    uint8_t* tile = tile_at(kv, layout, args.batch, sequence, position, head);
    if (has_tail(kv.format))
      encode_k(KVFormat::bf16, rotated, head_dim, slot, tail_tile_at(kv, args.batch, sequence, position, head));
    else
      encode_k(kv.format, rotated, head_dim, slot, tile);
    encode_v(kv.format, value, head_dim, slot, tile + layout.v_offset);
  }
}

// A token writes a few bytes in each line of a K tile, and in those of V of its pair (16 bits a number) or its four (8 bits).
void ask_for_token(const RopeWriteArgs& args, int sequence, int, int position) {
  const KVLayerArgs& kv = args.kv;
  if (has_tail(kv.format)) return;
  const TileLayout layout = tile_layout(kv);
  const int parts = is_fp8(kv.format) || kv.format == KVFormat::int8 ? 4 : 8;
  const int64_t v_bytes = (layout.bytes - layout.v_codes) / parts, v_slot = layout.v_codes + position % kTileTokens * parts / kTileTokens * v_bytes;
  for (int head = 0; head < kv.num_kv_heads; head++) {
    const uint8_t* tile = tile_at(kv, layout, args.batch, sequence, position, head);
    for (int64_t line = 0; line < layout.v_offset; line += 64) __builtin_prefetch(tile + line, 1, 2);
    for (int64_t line = 0; line < v_bytes; line += 64) __builtin_prefetch(tile + v_slot + line, 1, 2);
  }
}

// Quantises K of a tile that is full now.
void fill_tile(const RopeWriteArgs& args, int sequence, int, int position) {
  if (position % kTileTokens != kTileTokens - 1) return;
  const KVLayerArgs& kv = args.kv;
  const TileLayout layout = tile_layout(kv);
  for (int head = 0; head < kv.num_kv_heads; head++)
    encode_k4(tail_tile_at(kv, args.batch, sequence, position, head), kv.head_dim,
              tile_at(kv, layout, args.batch, sequence, position, head));
}

bool fills_tiles(const BatchArgs& batch) {
  for (int i = 0; i < batch.num_sequences; i++) {
    const int start = batch.start_position[i], end = start + batch.query_start[i + 1] - batch.query_start[i];
    if (start / kTileTokens != end / kTileTokens) return true;
  }
  return false;
}

}  // namespace

void ask_for_slots(ThreadPool& pool, const RopeWriteArgs& args, int first, int num_rows) {
  for_each_row<RopeWriteArgs, ask_for_token>(pool, args, first, num_rows);
}

void rope_write(ThreadPool& pool, const RopeWriteArgs& args, int first, int num_rows) {
  for_each_row<RopeWriteArgs, write_token>(pool, args, first, num_rows);
}

void finish_tiles(ThreadPool& pool, const RopeWriteArgs& args) {
  if (has_tail(args.kv.format) && fills_tiles(args.batch)) for_each_row<RopeWriteArgs, fill_tile>(pool, args);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
