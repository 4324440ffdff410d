#include <cstdlib>
#include "ops.hpp"
namespace octavo {
namespace OCTAVO_ISA {
void rms_norm(ThreadPool&, const float*, const float*, float, int, int, float*) { std::abort(); }
}  // namespace OCTAVO_ISA
}  // namespace octavo
