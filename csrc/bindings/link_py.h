// Links in capsules, in which Python passes them from the library that makes them to the core.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/internode/link.h"

namespace pycollective {

// The link in the capsule. Throws pybind11::error_already_set if there is none.
std::shared_ptr<Link> link_in(const pybind11::object& capsule);

}  // namespace pycollective
