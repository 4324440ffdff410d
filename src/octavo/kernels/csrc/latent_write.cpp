// Latents of new tokens into their slots of the pool.
#include "batch_rows.hpp"
#include "kv_encode.hpp"
#include "ops.hpp"

namespace octavo {
namespace OCTAVO_ISA {

namespace {

void write_token(const LatentWriteArgs& args, int sequence, int row, int position) {
  const int dim = args.kv.head_dim;
  uint8_t* tile = tile_at(args.kv, tile_layout(args.kv), args.batch, sequence, position, 0);
  encode_k(args.kv.format, args.latent + static_cast<size_t>(row) * dim, dim, position % kTileTokens, tile);
}

}  // namespace

void latent_write(ThreadPool& pool, const LatentWriteArgs& args) {
  for_each_row<LatentWriteArgs, write_token>(pool, args);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
