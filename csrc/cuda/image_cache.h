// What NVRTC has compiled, kept in the user's cache folder from one program to the next.
#pragma once

#include <optional>
#include <string>

#include "cuda/nvrtc.h"

namespace pycollective::cuda {

// $XDG_CACHE_HOME/pycollective or ~/.cache/pycollective; "" where a user has neither.
std::string cache_folder();

// What was stored under this name, if it is there and whole.
std::optional<Bytes> load_cached(const std::string& name);

// Whoever reads at the same time sees all of it or nothing. Where it cannot be written, nothing is
// kept: the next program compiles again.
void store_cached(const std::string& name, const Bytes& image);

}  // namespace pycollective::cuda
