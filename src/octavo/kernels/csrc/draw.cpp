// One token from each row of logits (kernels/draw.py says in numpy what is drawn). The weights are whole numbers, so
// every sum of them is exact and the same in any order and on every instruction set.
#include <algorithm>

#include "draw_lanes.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kChunk = 256;             // logits to one partial sum
constexpr float kLikely = 4194304.f;    // 2^22, the first look: of a highest weight of 2^32, mostly all that stays
constexpr float kStep = 1.f / 64.f;     // and how much lower each further look goes
constexpr double kFlat = 500.;          // weights that add up to so many of the highest: one look at all of them is cheaper
constexpr int kFewKeys = 32;

// The weight above, the complement of the id below: the greater key is the likelier token, the lower id among equals.
uint64_t key_of(float weight, int id) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
int id_of(uint64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }
double weight_of(uint64_t key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  float weight;
  std::memcpy(&weight, &bits, 4);
  return weight;
}
double sum_of(const uint64_t* first, const uint64_t* last) {
  double sum = 0;
  for (; first < last; first++) sum += weight_of(*first);
  return sum;
}

// What one thread works with; each array has room for a row.
struct Space {
  float* weights;  // whole vectors, zeros at the end
  double* sums;    // of the weights of each chunk
  uint64_t *found, *ordered;
};

struct Row {
  const float* logits;
  int size;
  DrawSettings s;
};

// The first of the highest logits; -1 where it is not finite, or any logit of a row that must be finite is not.
int find_best(const float* x, int size, bool must_be_finite) {
  F16 poison = zero();  // x * 0 is no number where x is none or infinite
  float best = -INFINITY;
  int best_chunk = -1;
  for (int start = 0; start < size; start += kChunk) {
    const int end = std::min(start + kChunk, size);
    F16 highest = set1(-INFINITY);
    int i = start;
    for (; i + kLanes <= end; i += kLanes) {
      const F16 v = load(x + i);
      highest = max(v, highest);
      poison = add(poison, mul(v, zero()));
    }
    if (i < end) {
      const F16 v = load_first(x + i, end - i);
      highest = max(first_lanes(v, set1(-INFINITY), end - i), highest);
      poison = add(poison, mul(v, zero()));
    }
    const float value = reduce_max(highest);
    if (value > best) best = value, best_chunk = start;
  }
  if (best_chunk < 0 || !(best < INFINITY)) return -1;
  if (must_be_finite && reduce_add(poison) != 0.f) return -1;
  const int end = std::min(best_chunk + kChunk, size);
  for (int i = best_chunk; i < end; i++)
    if (x[i] == best) return i;
  return -1;
}

// Fills weights and sums; returns the sum of all.
double weigh(const Row& row, float best, const Space& space) {
  const float temperature = static_cast<float>(std::max(row.s.temperature, kLeastTemperature));
  const F16 highest = set1(best), factor = set1(1.f / temperature);
  double total = 0;
  for (int start = 0; start < row.size; start += kChunk) {
    const int end = std::min(start + kChunk, row.size);
    ExactSum sum;
    for (int i = start; i < end; i += kLanes) {
      const bool is_whole = i + kLanes <= end;
      F16 x = is_whole ? load(row.logits + i) : first_lanes(load_first(row.logits + i, end - i), set1(-INFINITY), end - i);
      x = mul(sub(x, highest), factor);
      if (!not_below(x, set1(kNoWeight))) {
        store(space.weights + i, zero());
        continue;
      }
      const F16 weight = weight_lanes(x);
      store(space.weights + i, weight);
      sum.add(weight);
    }
    const double value = sum.value();
    space.sums[start / kChunk] = value;
    total += value;
  }
  return total;
}

// The id at which the cumulative sum of all weights passes the target.
int invert_all(const Row& row, const Space& space, double target) {
  double before = 0;
  int chunk = 0, last = 0;  // last: of the chunks with a weight
  const int num_chunks = (row.size + kChunk - 1) / kChunk;
  for (; chunk < num_chunks; chunk++) {
    if (before + space.sums[chunk] > target) break;
    if (space.sums[chunk] > 0) last = chunk;
    before += space.sums[chunk];
  }
  if (chunk == num_chunks) chunk = last, before -= space.sums[last];
  const int end = std::min((chunk + 1) * kChunk, row.size);
  int found = chunk * kChunk;
  for (int i = chunk * kChunk; i < end; i++) {
    if (space.weights[i] == 0.f) continue;
    found = i;
    before += static_cast<double>(space.weights[i]);
    if (before > target) break;
  }
  return found;
}

// Keys of the weights from `least` on, by ascending id; how many.
int gather(const Row& row, const Space& space, float least) {
  const F16 floor = set1(least);
  int count = 0;
  for (int i = 0; i < row.size; i += kLanes) {
    for (uint32_t mask = not_below(load(space.weights + i), floor); mask; mask &= mask - 1) {
      const int id = i + __builtin_ctz(mask);
      space.found[count++] = key_of(space.weights[id], id);
    }
  }
  return count;
}

// How many of the highest keys, put first, reach the target together.
int shortest(uint64_t* keys, int count, double target) {
  int low = 0, high = count;
  double before = 0;  // sum of the keys below `low`
  while (high - low > kFewKeys) {
    uint64_t a = keys[low], b = keys[low + (high - low) / 2], c = keys[high - 1];
    const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));  // never the least: keys are all different
    const int middle = static_cast<int>(std::partition(keys + low, keys + high, [=](uint64_t key) { return key >= pivot; }) - keys);
    const double sum = sum_of(keys + low, keys + middle);
    if (before + sum >= target) {
      high = middle;
    } else {
      before += sum;
      low = middle;
    }
  }
  std::sort(keys + low, keys + high, std::greater<uint64_t>());
  for (; low < high; low++) {
    before += weight_of(keys[low]);
    if (before >= target) return low + 1;
  }
  return high;
}

// A draw from what min_p, top_k and top_p leave.
int draw_truncated(const Row& row, const Space& space, double total) {
  const float floor = std::max(static_cast<float>(row.s.min_p) * kHighestWeight, 1.f);
  const int top_k = row.s.top_k > 0 && row.s.top_k < row.size ? static_cast<int>(row.s.top_k) : 0;
  const bool has_top_p = row.s.top_p < 1.0;
  const bool is_flat = total > kFlat * static_cast<double>(kHighestWeight);
  float least = row.s.min_p > 0 || (is_flat && !top_k) ? floor : kLikely;
  int count;
  for (;; least = std::max(least * kStep, 1.f)) {
    count = gather(row, space, least);
    if (least <= floor) break;
    if (top_k ? count >= top_k : sum_of(space.found, space.found + count) >= row.s.top_p * total) break;
  }
  uint64_t edge = 0;
  if (top_k || has_top_p) {
    std::copy(space.found, space.found + count, space.ordered);
    int kept = count;
    if (top_k && top_k < count) {
      std::nth_element(space.ordered, space.ordered + top_k, space.ordered + count, std::greater<uint64_t>());
      kept = top_k;
    }
    if (has_top_p) {
      const bool is_whole = !top_k && row.s.min_p <= 0;
      kept = shortest(space.ordered, kept, row.s.top_p * (is_whole ? total : sum_of(space.ordered, space.ordered + kept)));
    }
    edge = *std::min_element(space.ordered, space.ordered + kept);
  }
  double sum = 0;
  for (int i = 0; i < count; i++)
    if (space.found[i] >= edge) sum += weight_of(space.found[i]);
  const double target = row.s.number * sum;
  int id = -1;
  double before = 0;
  for (int i = 0; i < count && !(before > target && id >= 0); i++) {
    if (space.found[i] < edge) continue;
    id = id_of(space.found[i]);
    before += weight_of(space.found[i]);
  }
  return id;
}

int draw_row(const Row& row, bool must_be_finite, const Space& space) {
  const int best = find_best(row.logits, row.size, must_be_finite);
  if (best < 0 || row.s.temperature == 0.0) return best;
  const double total = weigh(row, row.logits[best], space);
  const bool is_truncated = row.s.min_p > 0 || (row.s.top_k > 0 && row.s.top_k < row.size) || row.s.top_p < 1.0;
  return is_truncated ? draw_truncated(row, space, total) : invert_all(row, space, row.s.number * total);
}

struct Plan {
  size_t weights, sums, keys;  // numbers of each array of a Space
};

Plan plan_of(int size) {
  const size_t whole = (static_cast<size_t>(size) + kChunk - 1) / kChunk;
  return {whole * kChunk, (whole + 7) / 8 * 8, whole * kChunk};
}

size_t bytes_of(const Plan& plan) { return plan.weights * sizeof(float) + plan.sums * sizeof(double) + 2 * plan.keys * sizeof(uint64_t); }

void draw_piece(void* context, int piece, int thread) {
  const DrawArgs& args = *static_cast<const DrawArgs*>(context);
  const Plan plan = plan_of(args.vocab_size);
  char* own = static_cast<char*>(args.scratch) + bytes_of(plan) * static_cast<size_t>(thread);
  uint64_t* keys = reinterpret_cast<uint64_t*>(own);
  double* sums = reinterpret_cast<double*>(keys + 2 * plan.keys);
  const Space space = {reinterpret_cast<float*>(sums + plan.sums), sums, keys, keys + plan.keys};
  const float* logits = args.logits + static_cast<size_t>(args.rows[piece]) * static_cast<size_t>(args.vocab_size);
  args.out[piece] = draw_row({logits, args.vocab_size, args.settings[piece]}, args.must_be_finite, space);
}

}  // namespace

size_t draw_scratch_bytes(int vocab_size, int num_threads) { return bytes_of(plan_of(vocab_size)) * static_cast<size_t>(num_threads); }

void draw(ThreadPool& pool, const DrawArgs& args) { pool.run(args.num_draws, draw_piece, const_cast<DrawArgs*>(&args)); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
