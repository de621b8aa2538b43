// The codecs of exact packing, one call at a time, for tests and benchmarks.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_pack(pybind11::module_& module);

}  // namespace pycollective
