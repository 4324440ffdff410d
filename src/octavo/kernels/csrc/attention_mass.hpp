// How much attention each key gets: the softmax weights of some rows of one sequence, summed over these rows and over the
// query heads of a KV head, in units of 2^-40. They are whole numbers, so their sum depends on no order: neither threads
// nor steps change it (law 1). Scores are made as attention makes them (attention_run.hpp).
#pragma once
#include "attention_run.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

// A weight of 1 counts 2^40: 2^30 of its first part, each of which counts 2^10.
constexpr float kFirstUnits = 1073741824.f, kSecondUnits = 1024.f;
constexpr size_t kMaxScoreBytes = size_t{1} << 20;  // of a piece of several tokens

// What each thread needs: the scores of a piece, [block][span][kMaxRows][kSpanKeys], and the mass of one KV head.
struct MassSpace {
  ThreadSpace rows;
  float* scores;
  int64_t* mass;
};

struct MassWork {
  const MassArgs* args;
  Work attention;     // of its plan: the rule and the sizes
  int num_chunks;     // of the rows
  int num_spans;      // that the last row sees
  int num_blocks;     // of a piece at most
  uint8_t* threads;
  size_t thread_bytes;
};

template <class Form>
MassSpace carve_mass(Carver& carver, const MassWork& work) {
  MassSpace space;
  space.rows = carve_thread<Form>(carver, work.attention.plan);
  space.scores = carver.take<float>(static_cast<size_t>(work.num_blocks) * work.num_spans * kMaxRows * kSpanKeys);
  space.mass = carver.take<int64_t>(static_cast<size_t>(work.num_spans) * kSpanKeys);
  return space;
}

template <class Form>
MassWork plan_mass(const MassArgs& args) {
  MassWork work = {};
  const AttentionArgs& attention = args.attention;
  AttentionPlan& plan = work.attention.plan;
  work.args = &args;
  work.attention.args = &attention;
  work.attention.layout = tile_layout(attention.kv);
  plan.rule = {attention.kv.head_dim, attention.kv.head_dim, 0x7fffffff, 0.f};
  plan.group = attention.num_heads / attention.kv.num_kv_heads;
  work.num_spans = (args.num_slots - 1) / kSpanKeys + 1;
  plan.piece_tokens = 16;
  while (plan.piece_tokens > 1 &&
         plan.piece_tokens * plan.group * work.num_spans * kSpanKeys * sizeof(float) > kMaxScoreBytes)
    plan.piece_tokens /= 2;
  work.num_blocks = max_row_blocks(plan.piece_tokens * plan.group) + 1;  // at most 16 tokens touch two strips
  plan.max_rows = plan.piece_tokens * plan.group;
  work.num_chunks = (args.num_rows + plan.piece_tokens - 1) / plan.piece_tokens;
  Carver thread = {nullptr, 0};
  carve_mass<Form>(thread, work);
  work.thread_bytes = (thread.used + 4095) / 4096 * 4096;
  return work;
}

template <class Tiles, int kRows>
static __attribute__((noinline)) void score_rows(const SpanTiles& tiles, int num_tiles, const uint32_t* q, int head_dim,
                                                 float (*out)[kSpanKeys]) {
  constexpr int kWide = Tiles::vectors_for(kRows);
  int tile = 0;
  for (; tile + kWide <= num_tiles; tile += kWide)
    Tiles::template scores<kRows, kWide, false>(tiles.k + tile, tiles.next, q, head_dim, tiles.k_scales, out, tile * 16);
  for (; tile < num_tiles; tile++)
    Tiles::template scores<kRows, 1, false>(tiles.k + tile, tiles.next, q, head_dim, tiles.k_scales, out, tile * 16);
}

template <class Tiles>
void score_block(const RowBlock& block, const SpanTiles& tiles, int num_tiles, int head_dim, float (*out)[kSpanKeys]) {
  with_rows<Tiles::kRowLimit>(block.num_rows, [&](auto rows) {
    score_rows<Tiles, decltype(rows)::value>(tiles, num_tiles, block.q, head_dim, out);
  });
}

// One row's scores of slots 0 to its own become weights, and are added. `scores` is its part of the first span.
void add_row(float* scores, int position, int64_t* mass) {
  const int num_tiles = position / kTileTokens + 1;
  const auto tile_at = [&](int tile) { return scores + static_cast<size_t>(tile / kSpanTiles) * kMaxRows * kSpanKeys + tile % kSpanTiles * 16; };
  float* last = tile_at(num_tiles - 1);
  const int seen = position % kTileTokens + 1;
  if (seen < 16) store(last, first_lanes(load(last), set1(-__builtin_inff()), seen));
  F16 largest = set1(kLowestScore), sum = zero();
  for (int tile = 0; tile < num_tiles; tile++) largest = max(load(tile_at(tile)), largest);
  const F16 most = set1(max_lanes(largest));
  for (int tile = 0; tile < num_tiles; tile++) {
    const F16 weight = weight_exp2(sub(load(tile_at(tile)), most));
    store(tile_at(tile), weight);
    sum = add(sum, weight);
  }
  const float factor = kFirstUnits / sum_lanes(sum);
  for (int tile = 0; tile < num_tiles; tile++) {
    const float* weights = tile_at(tile);
    int64_t* to = mass + tile * 16;
    for (int i = 0; i < 16; i++) {
      const float product = weights[i] * factor, units = product > 0.f ? product : 0.f;  // a NaN counts nothing
      const int32_t first = static_cast<int32_t>(units);
      const int32_t second = static_cast<int32_t>((units - static_cast<float>(first)) * kSecondUnits);
      to[i] += static_cast<int64_t>(first) * 1024 + second;
    }
  }
}

// The rows of some tokens and all query heads of one KV head.
template <class Form>
void mass_piece(void* context, int piece_index, int thread) {
  const MassWork& work = *static_cast<const MassWork*>(context);
  const MassArgs& args = *work.args;
  const AttentionPlan& plan = work.attention.plan;
  Carver carver = {work.threads + work.thread_bytes * thread, 0};
  MassSpace space = carve_mass<Form>(carver, work);
  Piece piece = {};
  piece.sequence = args.sequence;
  piece.kv_head = piece_index / work.num_chunks;
  piece.num_heads = plan.group;
  piece.first_head = piece.kv_head * plan.group;
  piece.first_token = args.first_row + piece_index % work.num_chunks * plan.piece_tokens;
  const int end = args.first_row + args.num_rows;
  piece.num_tokens = piece.first_token + plan.piece_tokens < end ? plan.piece_tokens : end - piece.first_token;
  const int num_blocks = make_blocks<Form>(args.attention, plan.rule, piece, space.rows);
  pack_queries<typename Form::Tiles>(args.attention, piece, space.rows, num_blocks);

  const int last = args.attention.batch.start_position[piece.sequence] + piece.first_token + piece.num_tokens - 1;
  const int num_spans = last / kSpanKeys + 1;
  const size_t span_floats = static_cast<size_t>(kMaxRows) * kSpanKeys, block_floats = span_floats * work.num_spans;
  SpanTiles tiles = {};
  for (const uint8_t*& line : tiles.next) line = reinterpret_cast<const uint8_t*>(space.rows.q);
  for (int span = 0; span < num_spans; span++) {
    const TileRange range = find_tiles(work.attention, piece, span);
    if constexpr (Form::kPrepares) {
      Form::prepare(args.attention.kv, plan.rule, range, nullptr, space.rows.prepared, tiles);
    } else {
      for (int i = range.first; i < range.end; i++) tiles.k[i] = range.at[i];
    }
    for (int i = 0; i < num_blocks; i++) {
      const RowBlock& block = space.rows.blocks[i];
      if (!block.sees(span)) continue;
      const int seen = block.last_position() / kTileTokens + 1 - span * kSpanTiles;
      float* to = space.scores + i * block_floats + span * span_floats;
      score_block<typename Form::Tiles>(block, tiles, seen < kSpanTiles ? seen : kSpanTiles, plan.rule.k_dim,
                                        reinterpret_cast<float(*)[kSpanKeys]>(to));
    }
  }
  const int num_slots = (last / kTileTokens + 1) * kTileTokens;
  std::memset(space.mass, 0, sizeof(int64_t) * num_slots);
  for (int i = 0; i < num_blocks; i++) {
    const RowBlock& block = space.rows.blocks[i];
    for (int row = 0; row < block.num_rows; row++)
      add_row(space.scores + i * block_floats + row * kSpanKeys, block.position[row], space.mass);
  }
  int64_t* to = args.mass + static_cast<size_t>(piece.kv_head) * args.num_slots;
  for (int slot = 0; slot <= last; slot++) {
    if (work.num_chunks == 1) to[slot] += space.mass[slot];
    else if (space.mass[slot]) __atomic_fetch_add(to + slot, space.mass[slot], __ATOMIC_RELAXED);
  }
}

template <class Form>
size_t mass_scratch_bytes_of(const MassArgs& args, int num_threads) {
  return plan_mass<Form>(args).thread_bytes * num_threads;
}

template <class Form>
void run_mass(ThreadPool& pool, const MassArgs& args) {
  MassWork work = plan_mass<Form>(args);
  work.threads = static_cast<uint8_t*>(args.attention.scratch);
  pool.run(work.num_chunks * args.attention.kv.num_kv_heads, mass_piece<Form>, &work);
}

}  // namespace

}  // namespace OCTAVO_ISA
}  // namespace octavo
