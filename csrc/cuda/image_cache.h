// What NVRTC has compiled, kept in the user's cache folder from one program to the next. Images are
// code: folder and files are the user's own, and nobody else can write them, or they are not used.
#pragma once

#include <optional>
#include <string>

#include "cuda/nvrtc.h"

namespace pycollective::cuda {

// $XDG_CACHE_HOME/pycollective or ~/.cache/pycollective; "" where a user has neither.
std::string cache_folder();

// Why nothing is kept, in words; "" where the folder is good, or not there yet.
std::string cache_refusal();

// What was stored under this name, if it is there, the user's own, and whole.
std::optional<Bytes> load_cached(const std::string& name);

// Whoever reads at the same time sees all of it or nothing. Where it cannot be written, nothing is
// kept: the next program compiles again.
void store_cached(const std::string& name, const Bytes& image);

}  // namespace pycollective::cuda
