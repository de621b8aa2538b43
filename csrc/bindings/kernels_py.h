// The kernels, one call at a time, for tests.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_kernels(pybind11::module_& module);

}  // namespace pycollective
