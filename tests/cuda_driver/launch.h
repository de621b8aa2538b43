// Launches: the blocks of a kernel, their threads as fibers, their barriers.
#pragma once

#include <cstddef>

#include "context.h"
#include "emulation.h"
#include "settings.h"

namespace standin {

using Kernel = pycollective::cuda::emulated::Kernel;

const Kernel* find_kernel(const char* name);
// Runs the kernel to its end on this thread. What it does wrong becomes the context's error.
void run_kernel(const Kernel& kernel, const void* parameters, unsigned blocks, unsigned threads,
                Context& context, Random& random);

// Which kernel and thread this thread runs, in words; whether it runs any.
bool running_kernel(char* text, std::size_t bytes);

}  // namespace standin
