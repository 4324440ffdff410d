#include "ops.hpp"

#define OCTAVO_STRING_(x) #x
#define OCTAVO_STRING(x) OCTAVO_STRING_(x)

namespace octavo {
namespace OCTAVO_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {OCTAVO_STRING(OCTAVO_ISA), linear_scratch_bytes, linear,     linear_gates, embedding,
                            rms_norm,                  silu_mul,             layer_norm, activation,
                            gated_activation,          softmax,              soft_cap,   rotate,
                            ask_for_slots,             rope_write,           finish_tiles, attention_scratch_bytes, paged_attention,
                            mass_scratch_bytes,        attention_mass,
                            latent_write,              latent_scratch_bytes, latent_attention,
                            draw_scratch_bytes,        draw};

}  // namespace OCTAVO_ISA
}  // namespace octavo
