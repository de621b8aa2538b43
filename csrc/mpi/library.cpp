#include "mpi/library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace pycollective {

template <class Handle>
MpiFunctions<Handle> load_mpi(const std::string& library) {
  // Only what is loaded: another copy of MPI would know nothing of this job. It stays loaded.
  void* const loaded = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) throw std::runtime_error(library + " is not loaded");
  const auto find = [&](const char* name, auto& function) {
    void* const found = dlsym(loaded, name);
    if (found == nullptr) throw std::runtime_error(library + " has no " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  MpiFunctions<Handle> mpi{};
  find("MPI_Isend", mpi.isend);
  find("MPI_Irecv", mpi.irecv);
  find("MPI_Testsome", mpi.testsome);
  find("MPI_Cancel", mpi.cancel);
  find("MPI_Test_cancelled", mpi.test_cancelled);
  find("MPI_Comm_free", mpi.comm_free);
  find("MPI_Finalized", mpi.finalized);
  find("MPI_Error_class", mpi.error_class);
  find("MPI_Error_string", mpi.error_string);
  return mpi;
}

template MpiFunctions<int> load_mpi<int>(const std::string&);
template MpiFunctions<void*> load_mpi<void*>(const std::string&);

}  // namespace pycollective
