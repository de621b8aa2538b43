// What the machine allows, and what a call costs without Python: the native side of the benchmark.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_machine(pybind11::module_& module);

}  // namespace pycollective
