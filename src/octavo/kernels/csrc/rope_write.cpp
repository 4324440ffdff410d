#include <cstdlib>
#include "ops.hpp"
namespace octavo {
namespace OCTAVO_ISA {
void rope_write(ThreadPool&, const RopeWriteArgs&) { std::abort(); }
}  // namespace OCTAVO_ISA
}  // namespace octavo
