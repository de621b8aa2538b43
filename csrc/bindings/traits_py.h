// The tables of dtype.h and collective.h, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_traits(pybind11::module_& module);

}  // namespace pycollective
