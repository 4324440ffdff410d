// The Python binding: checks shapes, owns scratch memory, releases the GIL. It does not compute.
#include <nanobind/nanobind.h>

#include "dispatch.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.def("supported_instruction_sets", [] {
    nb::list names;
    for (const auto* table : octavo::supported_tables()) names.append(table->name);
    return names;
  });
}
