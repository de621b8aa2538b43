// A link whose messages a Python object moves.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/link.h"

namespace pycollective {

// `pump`: as pycollective/transport/pump.py's Pump. The GIL is held.
std::shared_ptr<Link> make_python_link(pybind11::object pump);

}  // namespace pycollective
