// How threads share what there is to do.
#pragma once

#include "cuda/device.h"

namespace pycollective::cuda {

// Which of all threads this is; each takes every `stride`-th of what there is to do.
struct Share {
  std::uint64_t index, stride;
};

}  // namespace pycollective::cuda
