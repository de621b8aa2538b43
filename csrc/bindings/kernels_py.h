// The kernels that reduce, one call at a time: what pycollective/compression/ adds with, and tests.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "kernels/kernels.h"

namespace pycollective {

// The level of that name, or the one in force if it is empty. Throws std::invalid_argument.
SimdLevel level_named(const std::string& name);

void bind_kernels(pybind11::module_& module);

}  // namespace pycollective
