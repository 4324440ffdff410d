// Attention of any rows (prefill, chunks, decode, mixed) over K and V in blocks. See attention_span.hpp for the order
// of the additions, attention_plan.hpp for the pieces of work.
#include "attention_plan.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

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

struct ThreadSpace {
  ThreadBuffers* buffers;
  RowBlock* blocks;
  uint32_t* q;  // [max_rows][kMaxHeadDim]
  float* o;     // [max_rows][head_dim]
};

struct Work {
  const AttentionArgs* args;
  AttentionPlan plan;
  int num_threads;
  Piece* pieces;
  int32_t* counters;  // pieces of the same rows that have not ended
  float* partials;
  uint8_t* threads;
  size_t thread_bytes;
};

ThreadSpace carve_thread(Carver& carver, const AttentionPlan& plan, int head_dim) {
  ThreadSpace space;
  const size_t row_floats = static_cast<size_t>(plan.max_rows) * head_dim;
  // every 16 tokens begin a new strip, and a piece may begin and end inside one
  const size_t num_blocks = static_cast<size_t>(plan.piece_tokens / 16 + 1) * max_row_blocks(16 * plan.group);
  space.buffers = carver.take<ThreadBuffers>(1);
  uint32_t* v_tile = carver.take<uint32_t>(static_cast<size_t>(head_dim) * kTileTokens);
  space.blocks = carver.take<RowBlock>(num_blocks);
  space.q = carver.take<uint32_t>(static_cast<size_t>(plan.max_rows) * kMaxHeadDim);
  space.o = carver.take<float>(row_floats);
  if (carver.base) {
    space.buffers->v_tile = v_tile;
  }
  return space;
}

size_t carve(Carver carver, const AttentionArgs& args, const AttentionPlan& plan, int num_threads, Work& work) {
  Carver thread = {nullptr, 0};
  carve_thread(thread, plan, args.kv.head_dim);
  work.thread_bytes = (thread.used + 4095) / 4096 * 4096;
  work.threads = carver.take<uint8_t>(work.thread_bytes * num_threads);
  work.pieces = carver.take<Piece>(plan.num_pieces);
  work.counters = carver.take<int32_t>(plan.num_counters);
  work.partials = carver.take<float>(plan.num_partials);
  return carver.used;
}

// Cuts a piece's rows into blocks: strip by strip, within a strip token by token and head by head.
int make_blocks(const AttentionArgs& args, const AttentionPlan& plan, const Piece& piece, ThreadSpace& space) {
  const int row0 = args.batch.query_start[piece.sequence] + piece.first_token;
  const int first = args.batch.start_position[piece.sequence] + piece.first_token, end = first + piece.num_tokens;
  int num_blocks = 0, num_rows = 0;
  for (int strip = first; strip < end;) {
    const int next = (strip / 16 + 1) * 16 < end ? (strip / 16 + 1) * 16 : end;
    for (int row = 0, left = (next - strip) * plan.group; left > 0;) {
      RowBlock& block = space.blocks[num_blocks++];
      block.num_rows = take_rows(left);
      block.q = space.q + static_cast<size_t>(num_rows) * kMaxHeadDim;
      block.o = space.o + static_cast<size_t>(num_rows) * args.kv.head_dim;
      for (int i = 0; i < block.num_rows; i++, row++) {
        const int position = strip + row / plan.group;
        block.position[i] = position;
        block.out_row[i] = (row0 + position - first) * args.num_heads + piece.kv_head * plan.group + row % plan.group;
      }
      num_rows += block.num_rows;
      left -= block.num_rows;
    }
    strip = next;
  }
  return num_blocks;
}

template <class Tiles>
void pack_queries(const AttentionArgs& args, const ThreadSpace& space, int num_blocks) {
  const int head_dim = args.kv.head_dim;
  const F16 scale = set1(args.scale * 1.44269504f);  // weights are powers of 2
  for (int i = 0; i < num_blocks; i++) {
    const RowBlock& block = space.blocks[i];
    for (int row = 0; row < block.num_rows; row++) {
      const float* q = args.q + static_cast<size_t>(block.out_row[row]) * head_dim;
      Tiles::pack_query(q, scale, head_dim, block.q + row * Tiles::kQueryWords);
    }
  }
}

// Tiles of a span, as far as the piece's last row sees; returns how many.
int find_tiles(const AttentionArgs& args, const Piece& piece, int span, const uint8_t** k) {
  const int last = args.batch.start_position[piece.sequence] + piece.first_token + piece.num_tokens - 1;
  const int left = last / kTileTokens + 1 - span * kSpanTiles, num_tiles = left < kSpanTiles ? left : kSpanTiles;
  const int block_tiles = args.kv.block_size / kTileTokens;
  const int32_t* table = args.batch.block_table + static_cast<size_t>(piece.sequence) * args.batch.max_blocks;
  const int64_t tile_bytes = 2 * half_tile_bytes(args.kv);
  int block = span * kSpanTiles / block_tiles, inside = span * kSpanTiles % block_tiles;
  for (int i = 0; i < num_tiles; block++, inside = 0) {
    const uint8_t* tile = head_tiles(args.kv, table[block], piece.kv_head) + inside * tile_bytes;
    for (; inside < block_tiles && i < num_tiles; inside++, tile += tile_bytes) k[i++] = tile;
  }
  return num_tiles;
}

// What this thread will probably read after `span`: the piece's next span, or that of the piece it takes then.
int find_next_tiles(const Work& work, int piece_index, int span, const uint8_t** k) {
  const Piece& piece = work.pieces[piece_index];
  if (span + 1 < piece.end_span) return find_tiles(*work.args, piece, span + 1, k);
  const int next = piece_index + work.num_threads;
  return next < work.plan.num_pieces ? find_tiles(*work.args, work.pieces[next], work.pieces[next].first_span, k) : 0;
}

SpanResult partial_of(const Work& work, const Piece& piece, int span, const RowBlock& block, int block_index,
                      const float* first_o) {
  float* base = work.partials + piece.partials +
                static_cast<int64_t>(span) * max_partial_floats(work.plan, work.args->kv.head_dim, piece.num_tokens);
  float* sums = base + 2 * kLanes * block_index;
  const int num_blocks = 2 * max_row_blocks(piece.num_tokens * work.plan.group);
  return {base + 2 * kLanes * num_blocks + (block.o - first_o), sums, sums + kLanes, false};
}

void set_first_span(RowBlock& block, int head_dim, SpanResult result) {
  store(block.m, load(result.m));
  store(block.l, load(result.l));
  std::memcpy(block.o, result.o, sizeof(float) * block.num_rows * head_dim);
}

// The last piece of its rows merges all of their spans.
void merge_partials(const Work& work, const Piece& piece, ThreadSpace& space, int num_blocks) {
  const int head_dim = work.args->kv.head_dim;
  for (int i = 0; i < num_blocks; i++) {
    RowBlock& block = space.blocks[i];
    set_first_span(block, head_dim, partial_of(work, piece, 0, block, i, space.o));
    for (int span = 1; span <= block.last_position() / kSpanKeys; span++)
      merge_span(block, head_dim, partial_of(work, piece, span, block, i, space.o));
  }
}

constexpr int kPrefetchTokens = 4;  // a piece with more rows computes longer on a span than it waits for it

template <class Tiles>
void run_piece(void* context, int piece_index, int thread) {
  const Work& work = *static_cast<const Work*>(context);
  const AttentionArgs& args = *work.args;
  const Piece& piece = work.pieces[piece_index];
  const int head_dim = args.kv.head_dim;
  Carver carver = {work.threads + work.thread_bytes * thread, 0};
  ThreadSpace space = carve_thread(carver, work.plan, head_dim);
  const int num_blocks = make_blocks(args, work.plan, piece, space);
  pack_queries<Tiles>(args, space, num_blocks);

  const int half_bytes = static_cast<int>(half_tile_bytes(args.kv));
  const bool prefetch = piece.num_tokens <= kPrefetchTokens;
  SpanTiles tiles;
  const uint8_t* next[kSpanTiles];
  int num_tiles = find_tiles(args, piece, piece.first_span, tiles.k);
  if (prefetch && piece_index < work.num_threads)  // nobody asked for its first span yet
    for (int i = 0; i < num_tiles; i++)
      for (int line = 0; line < half_bytes / 32; line++) prefetch_line(tiles.k[i], line);
  for (int span = piece.first_span; span < piece.end_span; span++) {
    int num_next = 0;
    for (int i = 0; i < num_tiles; i++) tiles.v[i] = tiles.k[i] + half_bytes;
    if (prefetch) {
      num_next = find_next_tiles(work, piece_index, span, next);
      const uint8_t* nothing = reinterpret_cast<const uint8_t*>(space.q);
      for (int i = 0; i < 2 * num_tiles; i++)
        tiles.next[i] = i / 2 < num_next ? next[i / 2] + i % 2 * half_bytes : nothing;
    }
    for (int i = 0; i < num_blocks; i++) {
      RowBlock& block = space.blocks[i];
      if (block.last_position() < span * kSpanKeys) continue;
      const SpanResult result = piece.is_whole() ? SpanResult{block.o, block.m, block.l, span > 0}
                                                 : partial_of(work, piece, span, block, i, space.o);
      attend_span<Tiles>(block, span, tiles, prefetch && i == 0, head_dim, *space.buffers, result);
    }
    if (span + 1 == piece.end_span) break;
    if (prefetch) std::memcpy(tiles.k, next, sizeof next);
    num_tiles = prefetch ? num_next : find_tiles(args, piece, span + 1, tiles.k);
  }
  if (!piece.is_whole()) {
    if (__atomic_sub_fetch(&work.counters[piece.counter], 1, __ATOMIC_ACQ_REL) != 0) return;
    merge_partials(work, piece, space, num_blocks);
  }
  for (int i = 0; i < num_blocks; i++) finish_rows(space.blocks[i], head_dim, args.out);
}

}  // namespace

size_t attention_scratch_bytes(const AttentionArgs& args, int num_threads) {
  Work work;
  return carve(Carver{nullptr, 0}, args, plan_attention(args, num_threads), num_threads, work);
}

void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
  Work work;
  work.args = &args;
  work.num_threads = pool.num_threads();
  work.plan = plan_attention(args, work.num_threads);
  carve(Carver{static_cast<uint8_t*>(args.scratch), 0}, args, work.plan, work.num_threads, work);
  order_pieces(args, work.plan, work.pieces, work.counters);
  PieceFn fn = run_piece<WidenedTiles<F32Words>>;
#if OCTAVO_HAS_DPBF16
  if (args.kv.format == KVFormat::bf16) fn = run_piece<Bf16DotTiles>;
#else
  if (args.kv.format == KVFormat::bf16) fn = run_piece<WidenedTiles<Bf16Words>>;
#endif
  pool.run(work.plan.num_pieces, fn, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
