// How a call of paged attention is cut into pieces of work. Only speed depends on it: results do not (law 1).
#pragma once
#include <cstring>

#include "attention_span.hpp"

namespace octavo {
namespace OCTAVO_ISA {

// Some rows of one sequence, some query heads of one KV head, over some of the spans that they see. A piece that does all of its rows' spans
// writes the output; otherwise the spans' results wait in `partials` for the last piece of the same rows.
struct Piece {
  int32_t sequence, kv_head;
  int32_t first_head, num_heads;    // query heads
  int32_t first_token, num_tokens;  // counted from the sequence's first row of this call
  int32_t first_span, end_span;
  int32_t rows_span;  // first span that the rows see
  int32_t counter;   // of the pieces of these rows that have not ended; -1: this one does all of their spans
  int64_t partials;  // offset in floats; the same for all pieces of the rows

  bool is_whole() const { return counter < 0; }
};

struct AttentionPlan {
  SpanRule rule;
  int group;         // query heads of a piece at most
  int parts;         // of the query heads of a KV head
  int piece_tokens;  // of a long run of rows; a multiple of 16
  int piece_spans;   // of a short one
  int max_rows;      // in a piece
  int num_pieces, num_counters;
  int64_t num_partials;
};

constexpr int kShortTokens = 16;    // a sequence with no more rows in this call may be cut along its keys
constexpr int kMaxPieceHeads = 32;  // more query heads of one KV head are cut into parts
constexpr int kMaxPieceTokens = 64, kMaxPieceRows = 192, kMaxPieceSpans = 8;
constexpr int kPiecesPerThread = 12;
constexpr int kMaxPartialTokenSpans = 2048;  // bounds the memory of partial results, for more than one token

static inline int max_partial_floats(const AttentionPlan& plan, int num_tokens) {  // of one span
  return num_tokens * plan.group * plan.rule.v_dim + 2 * max_row_blocks(num_tokens * plan.group) * 2 * kLanes;
}

// Calls visit(piece) with sequence, tokens and spans filled in, for every KV head and part of its query heads.
template <class Visit>
static void for_each_head(const AttentionArgs& args, const AttentionPlan& plan, Piece piece, Visit&& visit) {
  const int heads = args.num_heads / args.kv.num_kv_heads;
  for (piece.kv_head = 0; piece.kv_head < args.kv.num_kv_heads; piece.kv_head++) {
    for (int first = 0; first < heads; first += plan.group) {
      piece.first_head = piece.kv_head * heads + first;
      piece.num_heads = first + plan.group < heads ? plan.group : heads - first;
      visit(piece);
    }
  }
}

// Calls visit(piece) for every piece, and counts them in the plan.
template <class Visit>
static void for_each_piece(const AttentionArgs& args, AttentionPlan& plan, Visit&& visit) {
  plan.num_pieces = plan.num_counters = 0;
  plan.num_partials = 0;
  const auto one = [&](const Piece& piece) {
    plan.num_pieces++;
    visit(piece);
  };
  for (int sequence = 0; sequence < args.batch.num_sequences; sequence++) {
    const int num_tokens = args.batch.query_start[sequence + 1] - args.batch.query_start[sequence];
    if (num_tokens <= 0) continue;
    const int start = args.batch.start_position[sequence], end = start + num_tokens;
    if (num_tokens > kShortTokens) {
      const int step = plan.piece_tokens;
      for (int chunk = (end - 1) / step; chunk >= start / step; chunk--) {  // what sees most keys first
        const int first = chunk * step > start ? chunk * step : start;
        const int last = (chunk + 1) * step < end ? (chunk + 1) * step : end;
        const int first_span = plan.rule.first_key(first) / kSpanKeys, end_span = (last - 1) / kSpanKeys + 1;
        for_each_head(args, plan, {sequence, 0, 0, 0, first - start, last - first, first_span, end_span, first_span, -1, 0}, one);
      }
      continue;
    }
    const int first_span = plan.rule.first_key(start) / kSpanKeys, end_span = (end - 1) / kSpanKeys + 1;
    const int num_spans = end_span - first_span;
    const bool fits = num_tokens == 1 || num_tokens * num_spans <= kMaxPartialTokenSpans;
    const bool cut = fits && num_spans > plan.piece_spans;
    const int step = cut ? plan.piece_spans : num_spans;
    for_each_head(args, plan, {sequence, 0, 0, 0, 0, num_tokens, 0, 0, first_span, -1, 0}, [&](Piece piece) {
      for (int span = first_span; span < end_span; span += step) {
        piece.first_span = span;
        piece.end_span = span + step < end_span ? span + step : end_span;
        piece.counter = cut ? plan.num_counters : -1;
        piece.partials = plan.num_partials;
        one(piece);
      }
      if (!cut) return;
      plan.num_counters++;
      plan.num_partials += static_cast<int64_t>(num_spans) * max_partial_floats(plan, num_tokens);
    });
  }
}

static AttentionPlan plan_attention(const AttentionArgs& args, int num_threads) {
  AttentionPlan plan = {};
  const float cap = args.softcap * 1.44269504f;  // scores are exponents of 2
  plan.rule = {args.kv.head_dim, args.v_dim, args.window > 0 ? args.window : 0x7fffffff, cap};
  const int heads = args.num_heads / args.kv.num_kv_heads;
  plan.parts = (heads + kMaxPieceHeads - 1) / kMaxPieceHeads;
  plan.group = (heads + plan.parts - 1) / plan.parts;
  const int num_parts = plan.parts * args.kv.num_kv_heads;
  int64_t short_spans = 0, long_tokens = 0;
  for (int sequence = 0; sequence < args.batch.num_sequences; sequence++) {
    const int num_tokens = args.batch.query_start[sequence + 1] - args.batch.query_start[sequence];
    const int start = args.batch.start_position[sequence], end = start + num_tokens;
    if (num_tokens > kShortTokens) long_tokens += num_tokens;
    else if (num_tokens > 0) short_spans += (end - 1) / kSpanKeys + 1 - plan.rule.first_key(start) / kSpanKeys;
  }
  const int64_t spans = short_spans * num_parts / (kPiecesPerThread * num_threads);
  plan.piece_spans = spans < 1 ? 1 : spans > kMaxPieceSpans ? kMaxPieceSpans : static_cast<int>(spans);
  const int tokens = kMaxPieceRows / plan.group / 16 * 16;
  plan.piece_tokens = tokens < 16 ? 16 : tokens > kMaxPieceTokens ? kMaxPieceTokens : tokens;
  while (plan.piece_tokens > 16 && long_tokens / plan.piece_tokens * num_parts < 4 * num_threads) plan.piece_tokens -= 16;
  plan.max_rows = plan.group * plan.piece_tokens;
  for_each_piece(args, plan, [](const Piece&) {});
  return plan;
}

// Writes the pieces, those with most work first (in classes of powers of two; within a class as they come).
static void order_pieces(const AttentionArgs& args, AttentionPlan& plan, Piece* pieces, int32_t* counters) {
  int32_t starts[34] = {};
  const auto work_class = [](const Piece& piece) {
    const uint32_t work = static_cast<uint32_t>(piece.end_span - piece.first_span) * (piece.num_tokens + 4);
    return __builtin_clz(work);
  };
  for (int i = 0; i < plan.num_counters; i++) counters[i] = 0;
  for_each_piece(args, plan, [&](const Piece& piece) {
    starts[work_class(piece) + 1]++;
    if (!piece.is_whole()) counters[piece.counter]++;
  });
  for (int i = 1; i < 34; i++) starts[i] += starts[i - 1];
  for_each_piece(args, plan, [&](const Piece& piece) { pieces[starts[work_class(piece)]++] = piece; });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
