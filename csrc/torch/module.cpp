// pycollective._torch: the shim, as Python sees it.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "torch/average.h"
#include "torch/backend.h"
#include "torch/ending.h"
#include "torch/errors.h"
#include "torch/gloo_link.h"

namespace py = pybind11;

namespace pycollective::shim {
namespace {

c10::intrusive_ptr<Backend> make_backend(py::object communicator,
                                         std::shared_ptr<CompletionThreads> threads) {
  const py::object capsule = communicator.attr("_capsule")();
  const auto* core =
      static_cast<std::shared_ptr<Collectives>*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  if (core == nullptr) throw py::error_already_set();
  return c10::make_intrusive<Backend>(*core, std::move(threads), std::move(communicator));
}

}  // namespace
}  // namespace pycollective::shim

PYBIND11_MODULE(_torch, module) {
  using namespace pycollective::shim;
  module.doc() = "The c10d backend over the core's communicators.";
  py::module_::import("torch.distributed");  // makes the base class known
  init_typed_exceptions();

  py::class_<CompletionThreads, std::shared_ptr<CompletionThreads>>(
      module, "CompletionThreads",
      "Threads that complete futures and run their callbacks, started when needed.")
      .def(py::init([](int rank, double limit) {
             return std::make_shared<CompletionThreads>(
                 rank, std::chrono::milliseconds(static_cast<std::int64_t>(limit * 1e3)));
           }),
           py::arg("rank"), py::arg("limit"))
      .def_static("any_busy", &CompletionThreads::any_busy,
                  "Whether any has a call under way, or a callback.")
      .def_static(
          "end_all",
          [] {
            CompletionThreads::end_all();
            end_other_threads();
          },
          "For the end of the process: let all callbacks end, at most `limit` seconds each, and "
          "end the threads. What is posted after that is kept for ever, and other threads that are "
          "in a call of this module do not come back.");

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(
      module, "Backend", "torch.distributed's operations over a pycollective.Communicator.")
      .def(py::init(&make_backend), py::arg("communicator"), py::arg("threads"))
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def_property_readonly("communicator", &Backend::communicator,
                             "The communicator that does the work.");

  module.def(
      "gloo_link",
      [](c10::intrusive_ptr<c10d::Backend> group) {
        using pycollective::kLinkCapsule;
        using pycollective::Link;
        auto* link = new std::shared_ptr<Link>(std::make_shared<GlooLink>(std::move(group)));
        return py::capsule(link, kLinkCapsule, [](PyObject* it) {
          delete static_cast<std::shared_ptr<Link>*>(PyCapsule_GetPointer(it, kLinkCapsule));
        });
      },
      py::arg("group"),
      "A link over a c10d backend, in a capsule; the backend is its own from now on.");

  module.def(
      "average",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const py::object& bucket) {
        const auto tensor = bucket.cast<at::Tensor>();
        // DDP wants a Python object from a Python hook. Made here, so that the thread which
        // completes the bucket needs no GIL; and chained in C++, so that an error stays itself.
        c10::IValue result = torch::jit::toIValue(bucket, c10::PyObjectType::get());
        const pycollective::GilReleased unlocked;
        return std::make_shared<torch::jit::PythonFutureWrapper>(
            average(group, tensor, std::move(result)));
      },
      py::arg("group"), py::arg("bucket"),
      "Start the average of a tensor over a group, in place; a Future of the tensor.");

  module.def(
      "fail",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, const py::object& error) {
        std::exception_ptr carried = carried_exception(error.ptr());
        const pycollective::GilReleased unlocked;
        future->fut->setError(std::move(carried));
      },
      py::arg("future"), py::arg("error"),
      "End a Future with a Python exception, which whoever waits for it in C++ raises, too.");
}
