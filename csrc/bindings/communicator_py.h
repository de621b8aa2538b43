// The Python type of a communicator: checks, releases the GIL around the wait, translates errors.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_communicator(pybind11::module_& module);

}  // namespace pycollective
