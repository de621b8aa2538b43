// Which cores the ranks of a machine may use, and how a thread leaves one that it shares.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <optional>
#include <vector>

namespace pycollective {

// Where a thread of that process may run: the main one, or for pid 0 the calling one. Empty where
// Linux does not say: the process has ended, or there are more cores than a cpu_set_t counts.
std::optional<cpu_set_t> allowed_cores(pid_t pid);

// Whether each rank can have a core to itself. `more`: ranks of which only this is known, that they
// may run where those of `allowed` may.
bool each_has_a_core(std::vector<cpu_set_t> allowed, int more);

// Moves the calling thread to a core that is none of `taken`, where it may run. Returns false where
// there is none. Afterwards it may run where it could before.
bool move_off(const cpu_set_t& taken);

}  // namespace pycollective
