// out = x @ weights.T + bias, where weights are int8 or 4 bits with a scale for each group of 32 inputs.
//
// x is rounded to int8 first, a tile of up to kMaxGroupedRows rows at a time. A piece of work is a few panels times a block
// of tiles: its x stays in the second-level cache while the panels pass by.
#include "grouped_linear.hpp"

#include "grouped_rows.hpp"
#include "grouped_tile.hpp"
#include "linear_output.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr size_t kBlockBytes = 400 << 10;  // of rounded x
constexpr size_t kPieceBytes = 256 << 10;  // of weights, where they are read once
constexpr double kPieceMultiplyAdds = 12e6;
constexpr int kPiecesPerThread = 8;
constexpr double kInlineBytes = 32e3, kInlineMultiplyAdds = 4e5;  // less than a wake-up costs
constexpr double kInlineRounded = 1 << 14;                        // numbers of x, likewise
constexpr int kTableTiles = 3;  // that share panels: fewer do not repay a table of scales
constexpr int kCrossedTiles = 7;  // likewise, of codes for crossed products
constexpr int kTableRows = 4;   // of a tile then, at least
constexpr int kTableGroups = 192;  // at most: a larger table, beside panels as large, does not stay in the second-level cache
static_assert((kTableTiles - 1) * kMaxGroupedRows / kTableTiles >= kTableRows || !kHasScaleTables);

struct Plan {
  int groups, num_panels;                // where gated, panels of the first half, each with that of the second half
  int num_tiles, tile_rows, num_taller;  // tiles have tile_rows rows, the first num_taller one more
  size_t panel_bytes, gate_bytes;  // gate_bytes: from a panel of the first half to that of the second; 0: not gated
  size_t tile_bytes, high_bytes;  // from one rounded tile to the next; from one's high bytes to the next one's
  int num_blocks, block_tiles;
  size_t table_bytes;  // of a thread's table, of two panels; 0: there are none
  bool crossed;        // rows are rounded for crossed products
};

struct Work {
  LinearArgs args;
  Plan plan;
  int num_threads, num_pieces, panels_per_piece, tile_panels;
  void (*round)(const float* x, int num_inputs, int rows, int minimum_bits, int32_t* packed, int32_t* high);
  GroupedTileFn (*find)(int rows, int panels), (*find_with_table)(int rows, int panels);
  void (*fill_table)(const uint8_t* weights, size_t panel_bytes, int panels, int groups, int32_t* out);  // null: has none
};

int divide_up(int a, int b) { return (a + b - 1) / b; }
int least(int a, int b) { return a < b ? a : b; }

Plan make_plan(const LinearWeights& w, int num_rows, bool gated) {
  Plan plan;
  plan.groups = num_groups(w.num_inputs);
  plan.num_panels = divide_up(w.num_outputs, kLanes) / (gated ? 2 : 1);
  plan.panel_bytes = static_cast<size_t>(plan.groups) * group_bytes(w.dtype);
  plan.gate_bytes = gated ? plan.panel_bytes * plan.num_panels : 0;
  plan.num_tiles = divide_up(num_rows, kMaxGroupedRows);
  plan.tile_rows = num_rows / plan.num_tiles;
  plan.num_taller = num_rows % plan.num_tiles;
  const int rows = plan.tile_rows + (plan.num_taller ? 1 : 0);
  const bool by_table = kHasScaleTables && w.ordinary_scales && plan.num_tiles >= kTableTiles && plan.groups <= kTableGroups;
  plan.crossed = by_table && crosses_products(w.dtype) && plan.num_tiles >= kCrossedTiles;
  plan.table_bytes = by_table ? 4 * table_words(plan.crossed) * 2 * static_cast<size_t>(plan.groups) : 0;
  plan.tile_bytes = (4 * x_tile_words(w.dtype, plan.groups, rows, plan.crossed) + 63) / 64 * 64;
  plan.high_bytes = (4 * x_high_words(rows) * static_cast<size_t>(plan.groups) + 63) / 64 * 64;
  const int fit = static_cast<int>(kBlockBytes / plan.tile_bytes);
  plan.num_blocks = divide_up(plan.num_tiles, fit < 1 ? 1 : fit);
  plan.block_tiles = divide_up(plan.num_tiles, plan.num_blocks);
  return plan;
}

int first_row(const Plan& plan, int tile) { return tile * plan.tile_rows + least(tile, plan.num_taller); }
int rows_of(const Plan& plan, int tile) { return plan.tile_rows + (tile < plan.num_taller ? 1 : 0); }

int32_t* rounded_tile(const Work& work, int tile) {
  return reinterpret_cast<int32_t*>(static_cast<uint8_t*>(work.args.scratch) + work.plan.tile_bytes * tile);
}

int32_t* high_bytes_of_tile(const Work& work, int tile) {
  uint8_t* first = static_cast<uint8_t*>(work.args.scratch) + work.plan.tile_bytes * work.plan.num_tiles;
  return reinterpret_cast<int32_t*>(first + work.plan.high_bytes * tile);
}

int32_t* table_of_thread(const Work& work, int thread) {
  uint8_t* first = static_cast<uint8_t*>(work.args.scratch) + (work.plan.tile_bytes + work.plan.high_bytes) * work.plan.num_tiles;
  return reinterpret_cast<int32_t*>(first + work.plan.table_bytes * thread);
}

void round_piece(void* context, int tile, int) {
  const Work& work = *static_cast<const Work*>(context);
  const int inputs = work.args.weights->num_inputs;
  work.round(work.args.x + static_cast<size_t>(first_row(work.plan, tile)) * inputs, inputs, rows_of(work.plan, tile),
             work.args.weights->minimum_bits, rounded_tile(work, tile), high_bytes_of_tile(work, tile));
}

// Where the share of a tile begins in what comes next: of panels, or of a panel and the one that it gates.
const uint8_t* next_share(const Plan& plan, const uint8_t* next, size_t offset) {
  return plan.gate_bytes && offset >= plan.panel_bytes ? next + plan.gate_bytes + offset - plan.panel_bytes : next + offset;
}

// A group of panels, all tiles of a block; next_panel: where the group after this one begins.
void run_panels(const Work& work, int panel, int panels, int block, int next_panel, int thread) {
  const Plan& plan = work.plan;
  const LinearArgs& args = work.args;
  const bool gated = plan.gate_bytes != 0;
  const uint8_t* weights = static_cast<const uint8_t*>(args.weights->weights);
  const int first = block * plan.block_tiles, last = least(first + plan.block_tiles, plan.num_tiles);
  const int in_tile = gated ? 2 : panels, width = gated ? plan.num_panels * kLanes : args.weights->num_outputs;
  const size_t stride = static_cast<size_t>(width);
  const size_t share = plan.panel_bytes / plan.groups * in_tile / (last - first);
  const size_t step = plan.num_tiles == 1 ? plan.panel_bytes / plan.groups : share;
  const bool whole = (panel + panels) * kLanes <= width && !args.weights->bias;
  const TileEnd end = gated ? TileEnd::gate : !whole ? TileEnd::keep : args.accumulate ? TileEnd::accumulate : TileEnd::put;
  const uint8_t* from = weights + plan.panel_bytes * panel;
  const size_t apart = gated ? plan.gate_bytes : plan.panel_bytes;
  const bool by_table = work.fill_table != nullptr;
  int32_t* table = by_table ? table_of_thread(work, thread) : nullptr;
  if (by_table) work.fill_table(from, apart, in_tile, plan.groups, table);
  const float* units = args.weights->minimum_units ? args.weights->minimum_units + panel * kLanes : nullptr;
  const size_t units_apart = gated ? static_cast<size_t>(width) : kLanes;
  const auto find = by_table ? work.find_with_table : work.find;
  const GroupedTileFn run_tall = find(plan.tile_rows + (plan.num_taller ? 1 : 0), in_tile), run_low = find(plan.tile_rows, in_tile);
  float sums[kMaxGroupedRows * 4 * kLanes];
  for (int tile = first; tile < last; tile++) {
    const int row = first_row(plan, tile), rows = rows_of(plan, tile);
    const uint8_t* next = next_share(plan, weights + plan.panel_bytes * next_panel, share * plan.groups * (tile - first));
    float* out = end == TileEnd::keep ? sums : args.out + stride * row + panel * kLanes;
    const GroupedTileFn run = tile < plan.num_taller ? run_tall : run_low;
    run({from, apart, rounded_tile(work, tile), high_bytes_of_tile(work, tile), plan.groups, out, stride, end, next, step, table,
         units, units_apart});
    for (int r = 0; end == TileEnd::keep && r < rows; r++)
      for (int p = 0; p < panels; p++) finish_row(args, row + r, panel + p, load(sums + (r * panels + p) * kLanes));
  }
}

void linear_piece(void* context, int index, int thread) {
  const Work& work = *static_cast<const Work*>(context);
  const Plan& plan = work.plan;
  const int block = index % plan.num_blocks, first = index / plan.num_blocks * work.panels_per_piece;
  const int last = least(first + work.panels_per_piece, plan.num_panels);
  // Most likely this thread's next piece; fetching another's costs nothing, since the cores share a cache.
  const int after = least(index + work.num_threads, work.num_pieces - 1) / plan.num_blocks * work.panels_per_piece;
  for (int panel = first, panels = work.tile_panels; panel < last; panel += panels) {
    while (panels > last - panel) panels /= 2;
    run_panels(work, panel, panels, block, panel + panels < last ? panel + panels : after, thread);
  }
}

int choose_panels_per_piece(const Plan& plan, int num_threads, int num_rows, int num_inputs) {
  const double block_rows = static_cast<double>(num_rows) / plan.num_blocks;
  double most = static_cast<double>(plan.num_panels) * plan.num_blocks / (num_threads * kPiecesPerThread);
  const double by_work = kPieceMultiplyAdds / (block_rows * num_inputs * kLanes);
  const double by_bytes = static_cast<double>(kPieceBytes) / static_cast<double>(plan.panel_bytes);
  if (by_work < most) most = by_work;
  if (plan.num_tiles == 1 && by_bytes < most) most = by_bytes;
  int panels = 1;
  while (panels * 2 <= most && panels < 64) panels *= 2;
  return panels;
}

template <WeightsDtype kDtype>
Work make_work(const LinearArgs& args, const Plan& plan) {
  constexpr int kAnyRows = 1;
  const bool once = plan.num_tiles == 1;
  Work work = {args, plan, 1, 1, 1, 1, round_rows<kDtype, false>, nullptr, nullptr, nullptr};
  work.find = once ? find_grouped_tile<kDtype, TileReads::once, kAnyRows> : find_grouped_tile<kDtype, TileReads::shared, kAnyRows>;
  if constexpr (kHasScaleTables) {
    work.find_with_table = find_grouped_tile<kDtype, TileReads::with_table, kTableRows>;
    if (plan.table_bytes) work.fill_table = fill_table<kDtype, false>;
  }
  if constexpr (crosses_products(kDtype)) {
    if (!plan.crossed) return work;
    work.round = round_rows<kDtype, true>;
    work.find_with_table = find_grouped_tile<kDtype, TileReads::crossed, kTableRows>;
    work.fill_table = fill_table<kDtype, true>;
  }
  return work;
}

Work make_work(const LinearArgs& args) {
  const Plan plan = make_plan(*args.weights, args.num_rows, args.gated);
  switch (args.weights->dtype) {
    case WeightsDtype::int8: return make_work<WeightsDtype::int8>(args, plan);
    case WeightsDtype::int4: return make_work<WeightsDtype::int4>(args, plan);
    case WeightsDtype::int4_min: return make_work<WeightsDtype::int4_min>(args, plan);
    default: return make_work<WeightsDtype::int4_whole_min>(args, plan);
  }
}

}  // namespace

size_t grouped_linear_scratch_bytes(const LinearWeights& weights, int num_rows, int num_threads) {
  const Plan plan = make_plan(weights, num_rows, false);
  return (plan.tile_bytes + plan.high_bytes) * static_cast<size_t>(plan.num_tiles) + plan.table_bytes * static_cast<size_t>(num_threads);
}

bool grouped_linear_gates(const LinearWeights& weights, int num_rows) {
  const Plan plan = make_plan(weights, num_rows, true);
  // tiles of few rows are faster with panels of one half; of more, two panels are the most
  return weights.num_outputs % (2 * kLanes) == 0 && !weights.bias && max_grouped_panels(plan.tile_rows) == 2;
}

void grouped_linear(ThreadPool& pool, const LinearArgs& args) {
  Work work = make_work(args);
  const Plan& plan = work.plan;
  const int inputs = args.weights->num_inputs;
  work.num_threads = pool.num_threads();
  work.panels_per_piece = choose_panels_per_piece(plan, work.num_threads, args.num_rows, inputs);
  work.tile_panels = args.gated ? 1 : least(max_grouped_panels(plan.tile_rows + (plan.num_taller ? 1 : 0)), work.panels_per_piece);
  work.num_pieces = divide_up(plan.num_panels, work.panels_per_piece) * plan.num_blocks;
  const int all_panels = plan.num_panels * (args.gated ? 2 : 1);
  const double bytes = static_cast<double>(plan.panel_bytes) * all_panels;
  const double multiply_adds = static_cast<double>(all_panels) * kLanes * inputs * args.num_rows;
  const bool inlined = bytes <= kInlineBytes && multiply_adds <= kInlineMultiplyAdds;
  if (inlined || static_cast<double>(args.num_rows) * inputs <= kInlineRounded) {
    for (int tile = 0; tile < plan.num_tiles; tile++) round_piece(&work, tile, 0);
  } else {
    pool.run(plan.num_tiles, round_piece, &work);
  }
  if (inlined) {
    for (int piece = 0; piece < work.num_pieces; piece++) linear_piece(&work, piece, 0);
  } else {
    pool.run(work.num_pieces, linear_piece, &work);
  }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
