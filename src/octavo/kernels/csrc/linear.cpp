// out = x @ weights.T + bias, from panels of 16 outputs in f32 or bf16 (grouped_linear.cpp has the others).
//
// x is packed first, a tile of up to kMaxTileRows rows at a time. A piece of work is a few panels times a block of tiles:
// its x stays in the second-level cache while the panels pass by. Inputs come in chunks where a row is long; the sums of a
// chunk are carried, unrounded, into the next, so that the cuts leave no trace in the result.
#include "grouped_linear.hpp"
#include "linear_output.hpp"
#include "linear_pack.hpp"
#include "linear_tile.hpp"
#include "ops.hpp"
#include "weight_groups.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kMaxChunkSteps = 1024;
constexpr int kMaxBlockTiles = 8;
constexpr int kMaxChunkedPanels = 8;                     // of a piece, where sums are carried
constexpr size_t kBlockBytes = 400 << 10;                // of packed x, of a chunk
constexpr size_t kPieceBytes = 512 << 10;                // of weights, where they are read once
constexpr double kPieceMultiplyAdds = 8e6;               // about 40 microseconds
constexpr int kPiecesPerThread = 8;
constexpr double kInlineBytes = 64e3, kInlineMultiplyAdds = 4e5;  // less than a wake-up costs
constexpr double kInlinePacked = 1 << 15;                         // numbers of x, likewise

struct Plan {
  int num_panels, steps, num_chunks, chunk_steps;
  int num_tiles, tile_rows, num_taller;  // tiles have tile_rows rows, the first num_taller one more
  size_t panel_bytes, tile_bytes;        // tile_bytes: from one packed tile to the next
  int x_bytes;                           // of packed x, for a row and a step
  int num_blocks, block_tiles;
};

struct Work {
  LinearArgs args;
  Plan plan;
  int num_threads, num_pieces, panels_per_piece, tile_panels;
  void (*pack)(const float* x, int num_inputs, int rows, int num_units, void* packed);
  TileFn (*find)(int rows, int panels);
};

int divide_up(int a, int b) { return (a + b - 1) / b; }

Plan make_plan(const LinearWeights& w, int num_rows) {
  Plan plan;
  const bool f32 = w.dtype == WeightsDtype::f32;
  plan.x_bytes = f32 ? F32Weights::kXBytes : Bf16Weights::kXBytes;
  plan.steps = divide_up(w.num_inputs, f32 ? F32Weights::kInputs : Bf16Weights::kInputs);
  plan.num_panels = divide_up(w.num_outputs, kLanes);
  plan.panel_bytes = static_cast<size_t>(plan.steps) * kStepBytes;
  plan.num_chunks = divide_up(plan.steps, kMaxChunkSteps);
  plan.chunk_steps = divide_up(plan.steps, plan.num_chunks);
  plan.num_tiles = divide_up(num_rows, kMaxTileRows);
  plan.tile_rows = num_rows / plan.num_tiles;
  plan.num_taller = num_rows % plan.num_tiles;
  const size_t row_bytes = static_cast<size_t>(plan.x_bytes) * (plan.tile_rows + (plan.num_taller ? 1 : 0));
  plan.tile_bytes = (row_bytes * plan.steps + kPackSlack + 63) / 64 * 64;
  const int fit = static_cast<int>(kBlockBytes / (row_bytes * plan.chunk_steps));
  plan.num_blocks = divide_up(plan.num_tiles, fit < 1 ? 1 : fit > kMaxBlockTiles ? kMaxBlockTiles : fit);
  plan.block_tiles = divide_up(plan.num_tiles, plan.num_blocks);
  return plan;
}

int first_row(const Plan& plan, int tile) { return tile * plan.tile_rows + (tile < plan.num_taller ? tile : plan.num_taller); }
int rows_of(const Plan& plan, int tile) { return plan.tile_rows + (tile < plan.num_taller ? 1 : 0); }

void pack_piece(void* context, int tile, int) {
  const Work& work = *static_cast<const Work*>(context);
  const Plan& plan = work.plan;
  const int inputs = work.args.weights->num_inputs;
  work.pack(work.args.x + static_cast<size_t>(first_row(plan, tile)) * inputs, inputs, rows_of(plan, tile),
            plan.steps * plan.x_bytes / 4, static_cast<uint8_t*>(work.args.scratch) + plan.tile_bytes * tile);
}

// One group of panels, one chunk of inputs, all tiles of a block.
struct Group {
  int panel, panels;
  int first_tile, num_tiles;
  int first_step, steps;
  int next_panel, next_step;  // where the group after this one begins
  bool last;
  float* sums;
};

void run_group(const Work& work, const Group& group) {
  const Plan& plan = work.plan;
  const uint8_t* weights = static_cast<const uint8_t*>(work.args.weights->weights);
  const uint8_t* x = static_cast<const uint8_t*>(work.args.scratch);
  const size_t offset = static_cast<size_t>(group.first_step) * kStepBytes;
  const uint8_t* next = weights + plan.panel_bytes * group.next_panel + static_cast<size_t>(group.next_step) * kStepBytes;
  const size_t next_bytes = static_cast<size_t>(group.steps) * kStepBytes * group.panels;
  float* sums = group.sums;
  for (int i = 0; i < group.num_tiles; i++) {
    const int tile = group.first_tile + i, rows = rows_of(plan, tile);
    const uint8_t* tile_x = x + plan.tile_bytes * tile + static_cast<size_t>(group.first_step) * rows * plan.x_bytes;
    const Tile args = {weights + plan.panel_bytes * group.panel + offset, plan.panel_bytes, tile_x, group.steps,
                       group.first_step > 0, sums, next + next_bytes * i / group.num_tiles,
                       kStepBytes * group.panels / group.num_tiles};
    work.find(rows, group.panels)(args);
    if (group.last)
      for (int r = 0; r < rows; r++)
        for (int p = 0; p < group.panels; p++)
          finish_row(work.args, first_row(plan, tile) + r, group.panel + p, load(sums + (r * group.panels + p) * kLanes));
    if (plan.num_chunks > 1) sums += rows * group.panels * kLanes;
  }
}

void linear_piece(void* context, int index, int) {
  const Work& work = *static_cast<const Work*>(context);
  const Plan& plan = work.plan;
  float sums[kMaxBlockTiles * kMaxTileRows * kMaxChunkedPanels * kLanes];
  const int first = index / plan.num_blocks * work.panels_per_piece, block = index % plan.num_blocks;
  const int last = first + work.panels_per_piece < plan.num_panels ? first + work.panels_per_piece : plan.num_panels;
  // Most likely this thread's next piece; fetching another's costs nothing, since the cores share a cache.
  const int next = index + work.num_threads < work.num_pieces ? index + work.num_threads : index;
  const int after = next / plan.num_blocks * work.panels_per_piece;
  Group group;
  group.first_tile = block * plan.block_tiles;
  group.num_tiles = plan.num_tiles - group.first_tile < plan.block_tiles ? plan.num_tiles - group.first_tile : plan.block_tiles;
  for (group.first_step = 0; group.first_step < plan.steps; group.first_step += plan.chunk_steps) {
    group.steps = plan.steps - group.first_step < plan.chunk_steps ? plan.steps - group.first_step : plan.chunk_steps;
    group.last = group.first_step + group.steps == plan.steps;
    group.sums = sums;
    for (group.panel = first; group.panel < last; group.panel += group.panels) {
      group.panels = work.tile_panels;
      while (group.panels > last - group.panel) group.panels /= 2;
      const bool ends_chunk = group.panel + group.panels == last;
      group.next_panel = !ends_chunk ? group.panel + group.panels : group.last ? after : first;
      group.next_step = !ends_chunk ? group.first_step : group.last ? 0 : group.first_step + group.steps;
      run_group(work, group);
      if (plan.num_chunks > 1) {
        for (int i = 0; i < group.num_tiles; i++) group.sums += rows_of(plan, group.first_tile + i) * group.panels * kLanes;
      }
    }
  }
}

int choose_panels_per_piece(const Plan& plan, int num_threads, int num_rows, int num_inputs) {
  const double block_rows = static_cast<double>(num_rows) / plan.num_blocks;
  double most = static_cast<double>(plan.num_panels) * plan.num_blocks / (num_threads * kPiecesPerThread);
  const double by_work = kPieceMultiplyAdds / (block_rows * num_inputs * kLanes);
  const double by_bytes = static_cast<double>(kPieceBytes) / static_cast<double>(plan.panel_bytes);
  if (by_work < most) most = by_work;
  if (plan.num_tiles == 1 && by_bytes < most) most = by_bytes;
  if (plan.num_chunks > 1 && kMaxChunkedPanels < most) most = kMaxChunkedPanels;
  int panels = 1;
  while (panels * 2 <= most && panels < 64) panels *= 2;
  return panels;
}

template <class Weights>
Work make_work(const LinearArgs& args, const Plan& plan) {
  return {args, plan, 1, 1, 1, 1, pack_rows<Weights>, plan.num_tiles == 1 ? find_tile<Weights, true> : find_tile<Weights, false>};
}

}  // namespace

size_t linear_scratch_bytes(const LinearWeights& weights, int num_rows, int num_threads) {
  if (has_groups(weights.dtype)) return grouped_linear_scratch_bytes(weights, num_rows, num_threads);
  const Plan plan = make_plan(weights, num_rows);
  return plan.tile_bytes * plan.num_tiles;
}

bool linear_gates(const LinearWeights& weights, int num_rows) {
  return has_groups(weights.dtype) && grouped_linear_gates(weights, num_rows);
}

void linear(ThreadPool& pool, const LinearArgs& args) {
  const LinearWeights& w = *args.weights;
  if (has_groups(w.dtype)) return grouped_linear(pool, args);
  const Plan plan = make_plan(w, args.num_rows);
  Work work = w.dtype == WeightsDtype::f32 ? make_work<F32Weights>(args, plan) : make_work<Bf16Weights>(args, plan);
  work.panels_per_piece = choose_panels_per_piece(plan, pool.num_threads(), args.num_rows, w.num_inputs);
  work.tile_panels = max_tile_panels(plan.tile_rows + (plan.num_taller ? 1 : 0));
  while (work.tile_panels > work.panels_per_piece) work.tile_panels /= 2;
  work.num_threads = pool.num_threads();
  work.num_pieces = divide_up(plan.num_panels, work.panels_per_piece) * plan.num_blocks;
  const double bytes = static_cast<double>(plan.panel_bytes) * plan.num_panels;
  if (bytes <= kInlineBytes && bytes / kStepBytes * kLanes * args.num_rows <= kInlineMultiplyAdds) {
    for (int tile = 0; tile < plan.num_tiles; tile++) pack_piece(&work, tile, 0);
    for (int piece = 0; piece < work.num_pieces; piece++) linear_piece(&work, piece, 0);
    return;
  }
  if (static_cast<double>(args.num_rows) * w.num_inputs <= kInlinePacked) {
    for (int tile = 0; tile < plan.num_tiles; tile++) pack_piece(&work, tile, 0);
  } else {
    pool.run(plan.num_tiles, pack_piece, &work);
  }
  pool.run(work.num_pieces, linear_piece, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
