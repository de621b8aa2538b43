// Quantization with error feedback, one call at a time: what pycollective/compression/ builds on.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_quantize(pybind11::module_& module);

}  // namespace pycollective
