// Refuses a request that cannot be right, before anything moves.
#pragma once

#include "engine/api.h"

namespace pycollective {

// Throws CollectiveFailure (kConfiguration).
void validate(const Request& request, int rank, int size);

}  // namespace pycollective
