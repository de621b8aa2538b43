// Memory and streams of a GPU, as little of them as tests, benchmarks and `verify` need.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_device_memory(pybind11::module_& module);

}  // namespace pycollective
