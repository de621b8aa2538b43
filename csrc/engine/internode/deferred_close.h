// Messengers that have said goodbye and have not heard all others': over MPI.
//
// MPI gives the number of a freed communicator to the next, and Open MPI counts the messages of
// each: one that comes late for the old communicator would upset the new. So a link over MPI is let
// go of only when nothing can come any more: each rank's goodbye is its last message. Whoever makes
// the next communicator looks whether earlier ones have heard them all. What is left at the end of
// the process, or after a failure, MPI ends itself.
#pragma once

#include <memory>

#include "engine/internode/messenger.h"

namespace pycollective {

// All of this process's, as MPI is one for the process. Thread-safe.
void defer_close(std::shared_ptr<Messenger> messenger);
void finish_deferred_closes();
// At the end of the process.
void give_up_deferred_closes();

}  // namespace pycollective
