// Links, as Python hands them from the library that makes them to the core.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/internode/link.h"

namespace pycollective {

// What the capsule carries; throws pybind11::error_already_set where it is none of a link.
std::shared_ptr<Link> link_in(const pybind11::object& capsule);

}  // namespace pycollective
