// A communicator's way to its GPUs, as Python makes it (pycollective/gpu/way.py).
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_device_group(pybind11::module_& module);

}  // namespace pycollective
