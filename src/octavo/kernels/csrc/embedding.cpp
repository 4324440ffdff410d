// Rows of the packed matrix, widened to f32: a tied head is stored once.
#include "half_float.hpp"
#include "ops.hpp"
#include "simd.hpp"
#include "weight_groups.hpp"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kRowsPerPiece = 8;

struct Embedding {
  const LinearWeights* table;
  const int32_t* token_ids;
  int num_rows;
  float* out;
};

float read_number(const uint8_t* p, bool is_half) {
  if (!is_half) {
    float number;
    std::memcpy(&number, p, 4);
    return number;
  }
  uint16_t half;
  std::memcpy(&half, p, 2);
  return from_f16(half);
}

float read_minimum(const LinearWeights& table, const uint8_t* panel, int group, int32_t output) {
  const size_t stride = group_bytes(table.dtype), lane = static_cast<size_t>(output % kLanes), at = static_cast<size_t>(group);
  if (!table.minimum_units) return read_number(panel + at * stride + kGroupScaleBytes / 2 + lane * 2, true);
  int16_t whole;
  std::memcpy(&whole, panel + (at / 2 * 2 + lane / 8) * stride + kGroupScaleBytes / 2 + (lane % 8 * 2 + at % 2) * 2, 2);
  return static_cast<float>(whole) * table.minimum_units[output];
}

void grouped_row(const LinearWeights& table, int32_t token_id, float* out) {
  const bool minimum = has_minima(table.dtype), bytes = table.dtype == WeightsDtype::int8;
  const size_t stride = group_bytes(table.dtype), lane = static_cast<size_t>(token_id % kLanes);
  const size_t panel = static_cast<size_t>(token_id / kLanes), groups = static_cast<size_t>(num_groups(table.num_inputs));
  const uint8_t* from = static_cast<const uint8_t*>(table.weights) + panel * groups * stride;
  for (int k = 0; k < table.num_inputs; k++) {
    const uint8_t* group = from + static_cast<size_t>(k / kGroupInputs) * stride;
    const int unit = k % kGroupInputs / 4, half = kGroupUnits / 2;
    const uint8_t* codes = group + kGroupScaleBytes + (bytes ? unit : unit % half) * 64 + lane * 4 + k % 4;
    const int code = bytes ? *codes : unit < half ? *codes & 15 : *codes >> 4;
    const float scale = read_number(group + lane * (minimum ? 2 : 4), minimum);
    out[k] = scale * static_cast<float>(code - code_offset(table.dtype));
    if (minimum) out[k] += read_minimum(table, from, k / kGroupInputs, token_id);
  }
}

void embedding_row(const LinearWeights& table, int32_t token_id, float* out) {
  const size_t inputs = static_cast<size_t>(table.num_inputs), lane = static_cast<size_t>(token_id % kLanes);
  const size_t panel = static_cast<size_t>(token_id / kLanes);
  if (has_groups(table.dtype)) return grouped_row(table, token_id, out);
  if (table.dtype == WeightsDtype::f32) {
    const float* from = static_cast<const float*>(table.weights) + panel * inputs * kLanes + lane;
    for (size_t k = 0; k < inputs; k++) out[k] = from[k * kLanes];
    return;
  }
  const size_t pairs = (inputs + 1) / 2;
  const uint16_t* from = static_cast<const uint16_t*>(table.weights) + (panel * pairs * kLanes + lane) * 2;
  for (size_t pair = 0; pair < inputs / 2; pair++) {
    out[2 * pair] = from_bf16(from[pair * kLanes * 2]);
    out[2 * pair + 1] = from_bf16(from[pair * kLanes * 2 + 1]);
  }
  if (inputs % 2) out[inputs - 1] = from_bf16(from[(pairs - 1) * kLanes * 2]);
}

void embedding_piece(void* context, int piece, int) {
  const Embedding& work = *static_cast<const Embedding*>(context);
  for (int row = piece * kRowsPerPiece; row < work.num_rows && row < (piece + 1) * kRowsPerPiece; row++)
    embedding_row(*work.table, work.token_ids[row], work.out + static_cast<size_t>(row) * work.table->num_inputs);
}

}  // namespace

void embedding(ThreadPool& pool, const LinearWeights& table, const int32_t* token_ids, int num_rows, float* out) {
  Embedding work = {&table, token_ids, num_rows, out};
  pool.run((num_rows + kRowsPerPiece - 1) / kRowsPerPiece, embedding_piece, &work);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
