// Top-k selection and sparse sums, one kernel at a time.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_sparse(pybind11::module_& module);

}  // namespace pycollective
