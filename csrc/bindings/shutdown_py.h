// The end of the process: what of the core is still there, and how it ends.
#pragma once

#include <memory>

#include "engine/communicator.h"
#include "engine/progress.h"

namespace pycollective {

// Both keep no share of it: what a program lets go of may outlive its Python object, while
// operations are pending, and says goodbye all the same. GIL held.
void remember(const std::shared_ptr<Communicator>& communicator);
void remember(const std::shared_ptr<Progress>& progress);

}  // namespace pycollective
