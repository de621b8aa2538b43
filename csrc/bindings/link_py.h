// A link whose messages a Python object moves.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/link.h"
#include "transport/node.h"

namespace pycollective {

// `pump`: as pycollective/transport/pump.py's Pump; `node`: whose doorbell it may ring. The GIL is
// held.
std::shared_ptr<Link> make_python_link(pybind11::object pump, std::shared_ptr<Node> node);

}  // namespace pycollective
