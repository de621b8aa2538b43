// CUDA as Python sees it: so far, what there is of it here.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_cuda(pybind11::module_& module);

}  // namespace pycollective
