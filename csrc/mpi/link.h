// Messages between hosts over MPI: whichever MPI the program was launched with.
//
// Every call is non-blocking and polled. MPI wakes nobody, so it rings no bell. A receive can be
// cancelled until its message has been matched; a send never (MPI-4 deprecates it, and MPICH over
// UCX crashes): it ends when its receiver takes it, or MPI has copied it.
#pragma once

#include <memory>
#include <vector>

#include "engine/internode/link.h"
#include "mpi/library.h"

namespace pycollective {

// `comm`: a communicator of MPI for this link alone, which frees it when it is closed, or, if
// `frees_unused`, at its end although no messenger ever had it; `ranks`: the number there of each
// of the communicator's ranks. Throws std::runtime_error where MPI is not as said.
std::shared_ptr<Link> make_mpi_link(const MpiConstants& constants, std::uint64_t comm,
                                    std::vector<int> ranks, bool frees_unused);

}  // namespace pycollective
