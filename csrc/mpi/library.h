// The functions of MPI that messages need, fetched at run time from whichever MPI the program has
// loaded. MPIs differ in what a handle is, an int or a pointer, and in the size of a status; mpi4py
// knows both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycollective {

// As mpi4py has them; handles as integers, sizes in bytes.
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

template <class Handle>
struct MpiFunctions {
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*testsome)(int, Handle*, int*, int*, void*);
  int (*cancel)(Handle*);
  int (*test_cancelled)(const void*, int*);
  int (*comm_free)(Handle*);
  int (*finalized)(int*);
  int (*error_class)(int, int*);
  int (*error_string)(int, char*, int*);
};

// Throws std::runtime_error where the library is not loaded, or lacks one.
template <class Handle>
MpiFunctions<Handle> load_mpi(const std::string& library);

extern template MpiFunctions<int> load_mpi<int>(const std::string&);
extern template MpiFunctions<void*> load_mpi<void*>(const std::string&);

}  // namespace pycollective
