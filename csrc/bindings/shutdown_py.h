// Shutdown: what of the core is still open at the end of the process, and how it ends.
#pragma once

#include <memory>

#include "engine/communicator.h"
#include "engine/progress.h"

namespace pycollective {

// Register what shutdown must end; both keep no share of it. It may outlive its Python object while
// operations are pending. GIL held.
void remember(const std::shared_ptr<Communicator>& communicator);
void remember(const std::shared_ptr<Progress>& progress);

}  // namespace pycollective
