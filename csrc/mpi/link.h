// Messages between hosts over MPI: whichever MPI the program was launched with.
//
// Every call is non-blocking and polled. MPI wakes nobody. A receive can be cancelled until its
// message has been matched; a send never (MPI-4 deprecates it, and MPICH over UCX crashes): it ends
// when its receiver takes it, or MPI has copied it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/internode/link.h"

namespace pycollective {

// What mpi4py knows of the MPI that is loaded. Handles are integers here, sizes in bytes: MPIs
// differ in what a handle is, an int or a pointer, and in the size of a status.
struct MpiConstants {
  std::string library;  // a file that is loaded, and linked with MPI
  std::size_t handle_bytes = 0;
  std::size_t status_bytes = 0;
  std::uint64_t byte = 0;          // the datatype
  std::uint64_t null_request = 0;  // MPI_REQUEST_NULL
  int any_source = 0;
  std::size_t error_offset = 0;  // of MPI_ERROR in a status, bytes
  // Classes of errors.
  int in_status = 0;            // MPI_ERR_IN_STATUS
  int proc_failed = 0;          // MPI_ERR_PROC_FAILED (MPIX_ before MPI 5)
  int proc_failed_pending = 0;  // of a receive from any rank, which goes on
};

// `comm`: a communicator of MPI for this link alone, which frees it when it is closed, or, if
// `frees_unused`, at its end although no messenger ever had it; `ranks`: the number there of each
// of the communicator's ranks. Throws std::runtime_error where MPI is not as said.
std::shared_ptr<Link> make_mpi_link(const MpiConstants& constants, std::uint64_t comm,
                                    std::vector<int> ranks, bool frees_unused);

}  // namespace pycollective
