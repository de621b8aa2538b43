#include "bindings/link_py.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/errors_py.h"
#include "bindings/module.h"
#include "mpi/link.h"

namespace py = pybind11;

namespace pycollective {
namespace {

py::capsule mpi_link(const std::string& library, std::size_t handle_bytes, std::size_t status_bytes,
                     std::uint64_t byte, std::uint64_t null_request, int any_source,
                     std::size_t error_offset, int in_status, int proc_failed,
                     int proc_failed_pending, std::uint64_t comm, std::vector<int> ranks,
                     bool frees_unused) {
  try {
    auto link = make_mpi_link({library, handle_bytes, status_bytes, byte, null_request, any_source,
                               error_offset, in_status, proc_failed, proc_failed_pending},
                              comm, std::move(ranks), frees_unused);
    return py::capsule(new std::shared_ptr<Link>(std::move(link)), kLinkCapsule, [](PyObject* it) {
      delete static_cast<std::shared_ptr<Link>*>(PyCapsule_GetPointer(it, kLinkCapsule));
    });
  } catch (const std::exception&) {
    raise_current_exception();
    throw py::error_already_set();
  }
}

}  // namespace

std::shared_ptr<Link> link_in(const py::object& capsule) {
  const auto* link =
      static_cast<std::shared_ptr<Link>*>(PyCapsule_GetPointer(capsule.ptr(), kLinkCapsule));
  if (link == nullptr) throw py::error_already_set();
  return *link;
}

void bind_link(py::module_& module) {
  module.def(
      "mpi_link", &mpi_link, py::arg("library"), py::arg("handle_bytes"), py::arg("status_bytes"),
      py::arg("byte"), py::arg("null_request"), py::arg("any_source"), py::arg("error_offset"),
      py::arg("in_status"), py::arg("proc_failed"), py::arg("proc_failed_pending"), py::arg("comm"),
      py::arg("ranks"), py::arg("frees_unused"),
      "A link over MPI, in a capsule: of `comm`, a communicator's handle, which it frees when "
      "it is closed, or, with `frees_unused`, if it is never used; "
      "`ranks`: the number there of each rank. The rest is as mpi4py knows it.");
}

}  // namespace pycollective
