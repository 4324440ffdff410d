// Attention of any rows (prefill, chunks, decode, mixed) over tiles in blocks: what paged and latent attention share.
// See attention_span.hpp for the order of the additions, attention_plan.hpp for the pieces of work.
//
// A form says how tiles are computed with: `Tiles`, the arithmetic; kScaled where tokens have scales. Where tiles are not
// computed with as they lie (kPrepares), `prepare` makes those of a span in a thread's memory, and may ask for the next
// span's meanwhile (kPrefetches). With kReadsCodes, few rows are computed by `CodeTiles` from the codes as they lie: the
// same operations on the same values, so the same bits. With kTails, rows read K of their own tile in a tail, in the form
// that `prepare` gives to tiles. With kAsksForWholeTiles, what is computed with asks for the next span's tiles as a whole.
#pragma once
#include "attention_plan.hpp"
#include "attention_turns.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// Tiles as they lie in the pool.
template <class Arithmetic>
struct PlainForm {
  using Tiles = Arithmetic;
  static constexpr bool kPrepares = false, kPrefetches = false, kReadsCodes = false, kScaled = false, kTails = false;
  static constexpr bool kAsksForWholeTiles = false;
};

namespace {

// Hands out parts of the scratch memory; with a null base it only counts.
struct Carver {
  uint8_t* base;
  size_t used;

  template <class T>
  T* take(size_t count) {
    T* found = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (count * sizeof(T) + 63) / 64 * 64;
    return found;
  }
};

// Room for the tiles of a span, as a form's `prepare` makes them.
struct PreparedTiles {
  uint8_t *k, *v;                          // [kSpanTiles][16 * k_dim or v_dim * 4 bytes at most]
  float *k_scales, *v_scales, *v_middles;  // [kSpanKeys]
};

// The tiles of a span that rows see, where they lie: those from `first` to `end`.
struct TileRange {
  int first, end;
  const uint8_t* at[kSpanTiles];
  int count() const { return end - first; }
};

struct ThreadSpace {
  ThreadBuffers* buffers;
  RowBlock* blocks;
  uint32_t* q;  // [max_rows][Tiles::kQueryWords]
  float* o;     // [max_rows][v_dim]
  PreparedTiles prepared;
};

struct Work {
  const AttentionArgs* args;
  TileLayout layout;
  AttentionPlan plan;
  int num_threads;
  Turns* turns;  // of each thread
  Ahead* ahead;  // likewise
  Piece* pieces;
  int32_t* counters;  // pieces of the same rows that have not ended
  float* partials;
  uint8_t* threads;
  size_t thread_bytes;
};

template <class Form>
ThreadSpace carve_thread(Carver& carver, const AttentionPlan& plan) {
  ThreadSpace space;
  const size_t row_floats = static_cast<size_t>(plan.max_rows) * plan.rule.v_dim;
  // every 16 tokens begin a new strip, and a piece may begin and end inside one
  const size_t num_blocks = static_cast<size_t>(plan.piece_tokens / 16 + 1) * max_row_blocks(16 * plan.group);
  space.buffers = carver.take<ThreadBuffers>(1);
  uint8_t* cut_tiles = carver.take<uint8_t>(static_cast<size_t>(plan.rule.v_dim) * 64 * kMaxCutTiles);
  space.blocks = carver.take<RowBlock>(num_blocks);
  space.q = carver.take<uint32_t>(static_cast<size_t>(plan.max_rows) * Form::Tiles::kQueryWords);
  space.o = carver.take<float>(row_floats);
  if constexpr (Form::kPrepares) {
    using Tiles = typename Form::Tiles;
    space.prepared.k = carver.take<uint8_t>(static_cast<size_t>(plan.rule.k_dim) * Tiles::kItemBytes * kSpanKeys);
    space.prepared.v = carver.take<uint8_t>(static_cast<size_t>(plan.rule.v_dim) * Tiles::kValueItemBytes * kSpanKeys);
    space.prepared.k_scales = carver.take<float>(kSpanKeys);
    space.prepared.v_scales = carver.take<float>(kSpanKeys);
    space.prepared.v_middles = carver.take<float>(kSpanKeys);
  }
  if (carver.base) space.buffers->cut_tiles = cut_tiles;
  return space;
}

template <class Form>
size_t carve(Carver carver, const AttentionPlan& plan, int num_threads, Work& work) {
  Carver thread = {nullptr, 0};
  carve_thread<Form>(thread, plan);
  work.thread_bytes = (thread.used + 4095) / 4096 * 4096;
  work.threads = carver.take<uint8_t>(work.thread_bytes * num_threads);
  work.turns = carver.take<Turns>(num_threads);
  work.ahead = carver.take<Ahead>(num_threads);
  work.pieces = carver.take<Piece>(plan.num_pieces);
  work.counters = carver.take<int32_t>(plan.num_counters);
  work.partials = carver.take<float>(plan.num_partials);
  return carver.used;
}

// Cuts a piece's rows into blocks: strip by strip, within a strip token by token and head by head.
template <class Form>
int make_blocks(const AttentionArgs& args, const SpanRule& rule, const Piece& piece, ThreadSpace& space) {
  const int row0 = args.batch.query_start[piece.sequence] + piece.first_token;
  const int first = args.batch.start_position[piece.sequence] + piece.first_token, end = first + piece.num_tokens;
  int num_blocks = 0, num_rows = 0;
  for (int strip = first; strip < end;) {
    const int next = (strip / 16 + 1) * 16 < end ? (strip / 16 + 1) * 16 : end;
    for (int row = 0, left = (next - strip) * piece.num_heads; left > 0;) {
      RowBlock& block = space.blocks[num_blocks++];
      block.num_rows = take_rows(left);
      block.q = space.q + static_cast<size_t>(num_rows) * Form::Tiles::kQueryWords;
      block.o = space.o + static_cast<size_t>(num_rows) * rule.v_dim;
      for (int i = 0; i < block.num_rows; i++, row++) {
        const int position = strip + row / piece.num_heads;
        block.position[i] = position;
        block.out_row[i] = (row0 + position - first) * args.num_heads + piece.first_head + row % piece.num_heads;
      }
      block.first_key = rule.first_key(block.position[0]);
      num_rows += block.num_rows;
      left -= block.num_rows;
    }
    strip = next;
  }
  return num_blocks;
}

// Asks for the rows of a block in x [rows, dim], which another thread may have written, or is to be written.
template <bool kToWrite>
OCTAVO_INLINE void ask_for_rows(const RowBlock& block, const float* x, int dim) {
  for (int row = 0; row < block.num_rows; row++) {
    const float* from = x + static_cast<size_t>(block.out_row[row]) * dim;
    for (int d = 0; d < dim; d += 16) __builtin_prefetch(from + d, kToWrite, 3);
  }
}

template <class Tiles>
void pack_queries(const AttentionArgs& args, const Piece& piece, const ThreadSpace& space, int num_blocks) {
  const int head_dim = args.kv.head_dim;
  const float* k_scales = args.kv.k_scales ? args.kv.k_scales + piece.kv_head * head_dim : nullptr;
  const F16 scale = set1(args.scale * 1.44269504f);  // weights are powers of 2
  for (int i = 0; i < num_blocks; i++) {
    const RowBlock& block = space.blocks[i];
    if (i + 1 < num_blocks) ask_for_rows<false>(space.blocks[i + 1], args.q, head_dim);
    alignas(64) float changed[kMaxRows * kMaxHeadDim];
    for (int first = 0, end; first < block.num_rows; first = end) {
      end = first + 1;  // rows that lie one behind the other go together
      while (end < block.num_rows && block.out_row[end] == block.out_row[end - 1] + 1) end++;
      const float* q = args.q + static_cast<size_t>(block.out_row[first]) * head_dim;
      if (k_scales) {
        for (int i = 0; i < (end - first) * head_dim; i += 16) store(changed + i, mul(load(q + i), load(k_scales + i % head_dim)));
        q = changed;
      }
      if (args.kv.turns_k) {
        turn(q, head_dim, end - first, changed);
        q = changed;
      }
      for (int row = first; row < end; row++, q += head_dim)
        Tiles::pack_query(q, scale, head_dim, block.q + row * Tiles::kQueryWords);
    }
  }
}

TileRange find_tiles(const Work& work, const Piece& piece, int span) {
  const AttentionArgs& args = *work.args;
  const int start = args.batch.start_position[piece.sequence] + piece.first_token, last = start + piece.num_tokens - 1;
  const int base = span * kSpanTiles, first = work.plan.rule.first_key(start) / kTileTokens - base;
  TileRange range;
  range.first = first > 0 ? first : 0;
  range.end = last / kTileTokens + 1 - base < kSpanTiles ? last / kTileTokens + 1 - base : kSpanTiles;
  const int block_tiles = args.kv.block_size / kTileTokens;
  const int32_t* table = args.batch.block_table + static_cast<size_t>(piece.sequence) * args.batch.max_blocks;
  int block = (base + range.first) / block_tiles, inside = (base + range.first) % block_tiles;
  for (int i = range.first; i < range.end; block++, inside = 0) {
    const uint8_t* tile = head_tiles(args.kv, work.layout, table[block], piece.kv_head) + inside * work.layout.bytes;
    for (; inside < block_tiles && i < range.end; inside++, tile += work.layout.bytes) range.at[i++] = tile;
  }
  return range;
}

// The piece that a thread computes now. It is called once for each piece, so there is one.
int take_piece(const Work& work, int thread) {
  for (int i = 0; i < work.num_threads; i++) {
    const int owner = (thread + i) % work.num_threads, turn = work.turns[owner].take(i == 0);
    if (turn >= 0) return owner + turn * work.num_threads;
  }
  __builtin_unreachable();
}

constexpr int kPrefetchTokens = 4;  // a piece with more rows computes longer on a span than it waits for it

// Up to `most` tiles that this thread has not asked for yet: of its piece, then of those that it will probably take then.
TileRange take_ahead(const Work& work, Ahead& ahead, int most) {
  TileRange found = {0, 0, {}};
  while (found.end < most && ahead.piece < work.plan.num_pieces) {
    const Piece& piece = work.pieces[ahead.piece];
    if (piece.num_tokens > kPrefetchTokens) break;
    const TileRange range = find_tiles(work, piece, ahead.span);
    while (found.end < most && ahead.tile < range.count()) found.at[found.end++] = range.at[range.first + ahead.tile++];
    if (ahead.tile < range.count()) break;
    ahead.tile = 0;
    if (++ahead.span < piece.end_span) continue;
    ahead.piece += work.num_threads;
    if (ahead.piece < work.plan.num_pieces) ahead.span = work.pieces[ahead.piece].first_span;
  }
  ahead.num_tiles += found.end;
  return found;
}

// What of `next` is to be asked for while `count` tiles are computed: half tiles in the order of addresses (without
// scales between them, which their form asks for), or whole tiles (or K tiles without V) while scores are computed and nothing after that.
void set_next(const TileLayout& layout, const TileRange& next, int count, bool whole_tiles, const uint8_t* nothing,
              const uint8_t** to) {
  if (whole_tiles) {
    for (int i = 0; i < 2 * count; i++) to[i] = i < count && i < next.count() ? next.at[next.first + i] : nothing;
  } else {
    for (int i = 0; i < 2 * count; i++)
      to[i] = i / 2 < next.count() ? next.at[next.first + i / 2] + i % 2 * layout.v_codes : nothing;
  }
}

inline void prefetch_tiles(const TileLayout& layout, const TileRange& range) {
  for (int i = range.first; i < range.end; i++)
    for (int line = 0; line < layout.bytes / 64; line++) prefetch_line(range.at[i], line);
}

SpanResult partial_of(const Work& work, const Piece& piece, int span, const RowBlock& block, int block_index,
                      const float* first_o) {
  float* base = work.partials + piece.partials +
                static_cast<int64_t>(span - piece.rows_span) * max_partial_floats(work.plan, piece.num_tokens);
  float* sums = base + 2 * kLanes * block_index;
  const int num_blocks = 2 * max_row_blocks(piece.num_tokens * work.plan.group);
  return {base + 2 * kLanes * num_blocks + (block.o - first_o), sums, sums + kLanes, false};
}

void set_first_span(RowBlock& block, int v_dim, SpanResult result) {
  store(block.m, load(result.m));
  store(block.l, load(result.l));
  std::memcpy(block.o, result.o, sizeof(float) * block.num_rows * v_dim);
}

// The last piece of its rows merges all of their spans.
void merge_partials(const Work& work, const Piece& piece, ThreadSpace& space, int num_blocks) {
  const int v_dim = work.plan.rule.v_dim;
  for (int i = 0; i < num_blocks; i++) {
    RowBlock& block = space.blocks[i];
    const int first = block.first_span();
    set_first_span(block, v_dim, partial_of(work, piece, first, block, i, space.o));
    for (int span = first + 1; block.sees(span); span++)
      merge_span(block, v_dim, partial_of(work, piece, span, block, i, space.o));
  }
}

// One span of a piece: its tiles, prepared or as they lie, and all blocks of rows that see it.
template <class Form>
void run_span(const Work& work, const Piece& piece, int span, const TileRange& range, const TileRange* next,
              ThreadSpace& space, int num_blocks) {
  const auto result_of = [&](RowBlock& block, int i) {
    return piece.is_whole() ? SpanResult{block.o, block.m, block.l, span > block.first_span()}
                            : partial_of(work, piece, span, block, i, space.o);
  };
  const SpanRule& rule = work.plan.rule;
  const uint8_t* nothing = reinterpret_cast<const uint8_t*>(space.q);
  SpanTiles tiles;
  tiles.k_scales = tiles.v_scales = tiles.v_middles = nullptr;
  if constexpr (Form::kReadsCodes) {
    RowBlock& block = space.blocks[0];
    if (next && piece.num_tokens == 1 && num_blocks == 1 && block.num_rows <= Form::CodeTiles::kRowLimit) {
      Form::read_codes(work.args->kv, range, tiles);
      set_next(work.layout, *next, range.count(), Form::kAsksForWholeTiles, nothing, tiles.next);
      return attend_span<typename Form::CodeTiles, true, Form::kScaled>(block, span, tiles, rule, *space.buffers, result_of(block, 0));
    }
  }
  if constexpr (Form::kPrepares) {
    Form::prepare(work.args->kv, rule, range, next, space.prepared, tiles);
  } else {
    for (int i = range.first; i < range.end; i++) {
      tiles.k[i] = range.at[i];
      tiles.v[i] = range.at[i] + work.layout.v_codes;
    }
  }
  bool ask = next && !Form::kPrefetches;
  for (int i = 0; i < num_blocks; i++) {
    RowBlock& block = space.blocks[i];
    if (!block.sees(span)) continue;
    const SpanResult result = result_of(block, i);
    if constexpr (!Form::kPrefetches) {
      if (ask) {
        set_next(work.layout, *next, range.count(), Form::kAsksForWholeTiles, nothing, tiles.next);
        attend_span<typename Form::Tiles, true, Form::kScaled>(block, span, tiles, rule, *space.buffers, result);
        ask = false;
        continue;
      }
    }
    if constexpr (Form::kTails) {
      const int last = block.last_position(), own = last / kTileTokens - span * kSpanTiles;  // of all rows of the block
      if (own < kSpanTiles) {
        SpanTiles with_own = tiles;
        with_own.k[own] = tail_tile_at(work.args->kv, work.args->batch, piece.sequence, last, piece.kv_head);
        attend_span<typename Form::Tiles, false, Form::kScaled>(block, span, with_own, rule, *space.buffers, result);
        continue;
      }
    }
    attend_span<typename Form::Tiles, false, Form::kScaled>(block, span, tiles, rule, *space.buffers, result);
  }
}

template <class Form>
void run_piece(void* context, int index, int thread) {
  const Work& work = *static_cast<const Work*>(context);
  const AttentionArgs& args = *work.args;
  const int piece_index = work.num_threads == 1 ? index : take_piece(work, thread);
  const Piece& piece = work.pieces[piece_index];
  Carver carver = {work.threads + work.thread_bytes * thread, 0};
  ThreadSpace space = carve_thread<Form>(carver, work.plan);
  const int num_blocks = make_blocks<Form>(args, work.plan.rule, piece, space);
  pack_queries<typename Form::Tiles>(args, piece, space, num_blocks);

  const bool prefetch = piece.num_tokens <= kPrefetchTokens;
  Ahead& ahead = work.ahead[thread];
  if (prefetch && ahead.expected != piece_index) {  // this thread's first, or another's
    ahead = {piece_index, piece.first_span, 0, 0, piece_index};
    prefetch_tiles(work.layout, take_ahead(work, ahead, kTilesAhead));
  }
  ahead.expected = prefetch ? piece_index + work.num_threads : -1;
  for (int span = piece.first_span; span < piece.end_span; span++) {
    const TileRange range = find_tiles(work, piece, span);
    TileRange next;
    if (prefetch) {
      ahead.num_tiles -= range.count();
      const int most = kTilesAhead - ahead.num_tiles;
      next = take_ahead(work, ahead, most < range.count() ? most : range.count());
    }
    run_span<Form>(work, piece, span, range, prefetch ? &next : nullptr, space, num_blocks);
  }
  if (!piece.is_whole()) {
    if (__atomic_sub_fetch(&work.counters[piece.counter], 1, __ATOMIC_ACQ_REL) != 0) return;
    merge_partials(work, piece, space, num_blocks);
  }
  const float* v_scales = args.kv.v_scales ? args.kv.v_scales + piece.kv_head * args.v_dim : nullptr;
  for (int i = 0; i < num_blocks; i++) {
    if (i + 1 < num_blocks) ask_for_rows<true>(space.blocks[i + 1], args.out, args.v_dim);
    finish_rows(space.blocks[i], args.v_dim, args.sinks, args.num_heads, v_scales, args.kv.turns_v, args.out);
  }
}

template <class Form>
size_t scratch_bytes_of(const AttentionArgs& args, int num_threads) {
  Work work;
  return carve<Form>(Carver{nullptr, 0}, plan_attention(args, num_threads), num_threads, work);
}

template <class Form>
void run_attention(ThreadPool& pool, const AttentionArgs& args) {
  Work work;
  work.args = &args;
  work.layout = tile_layout(args.kv);
  work.num_threads = pool.num_threads();
  work.plan = plan_attention(args, work.num_threads);
  carve<Form>(Carver{static_cast<uint8_t*>(args.scratch), 0}, work.plan, work.num_threads, work);
  order_pieces(args, work.plan, work.pieces, work.counters);
  for (int i = 0; i < work.num_threads; i++) {
    work.ahead[i].expected = -1;
    work.turns[i].range = static_cast<uint64_t>((work.plan.num_pieces - i + work.num_threads - 1) / work.num_threads) << 32;
  }
  pool.run(work.plan.num_pieces, run_piece<Form>, &work);
}

}  // namespace

}  // namespace OCTAVO_ISA
}  // namespace octavo
