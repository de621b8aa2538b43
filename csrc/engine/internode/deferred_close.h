// Links over MPI that close only once every rank has said goodbye.
//
// MPI gives the number of a freed communicator to the next one, and Open MPI counts the messages of
// each: a late message for the old communicator would upset the new. So a link over MPI is closed
// only when nothing can come any more: each rank's goodbye is its last message. The next
// communicator that is made checks whether earlier ones have heard all goodbyes. What is left at
// the end of the process, or after a failure, MPI itself ends.
#pragma once

#include <memory>

#include "engine/internode/messenger.h"

namespace pycollective {

// For all messengers of this process. Thread-safe.
void defer_close(std::shared_ptr<Messenger> messenger);
void finish_deferred_closes();
// At the end of the process.
void give_up_deferred_closes();

}  // namespace pycollective
