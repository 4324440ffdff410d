// Which instruction sets were compiled in, and which of them this machine can run.
#pragma once
#include <string>
#include <vector>

#include "kernel_table.hpp"

namespace octavo {

// Best first. Only those that the processor supports.
std::vector<const KernelTable*> supported_tables();

}  // namespace octavo
