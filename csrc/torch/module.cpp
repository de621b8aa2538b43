// pycollective._torch: the shim, as Python sees it.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gloo_link.h"
#include "torch/work.h"

namespace py = pybind11;

namespace pycollective::shim {
namespace {

// pycollective/shim/loading.py reads it from the file: beside another torch the file must not be
// loaded.
[[gnu::used]] const char kBuiltFor[] = "pycollective's shim for torch " TORCH_VERSION;

c10::intrusive_ptr<Backend> make_backend(py::object communicator,
                                         std::shared_ptr<CompletionThreads> threads,
                                         py::object device_side) {
  const py::object capsule = communicator.attr("_capsule")();
  const auto* core =
      static_cast<std::shared_ptr<Collectives>*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  if (core == nullptr) throw py::error_already_set();
  return c10::make_intrusive<Backend>(*core, std::move(threads), std::move(communicator),
                                      std::move(device_side));
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

// Starts the contract's average of `bucket` over `group`, in place; the future's value is `result`.
c10::intrusive_ptr<Future> average(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   const at::Tensor& bucket, c10::IValue result) {
  std::vector<at::Tensor> tensors{bucket};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  const c10::TypePtr type = result.type();
  return group->allreduce(tensors, options)
      ->getFuture()
      ->then(
          [result = std::move(result)](Future& done) {
            done.value();  // or its error
            return result;
          },
          type);
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
             return std::make_shared<CompletionThreads>(rank, milliseconds_of(limit));
           }),
           py::arg("rank"), py::arg("limit"))
      .def_static("any_busy", &CompletionThreads::any_busy,
                  "Whether any has a call under way, or a callback.")
      .def_static(
          "end_all",
          [] {
            CompletionThreads::end_all();
            stop_other_threads();
          },
          "For the end of the process: let all callbacks end, at most `limit` seconds each, and "
          "end the threads. What is posted after that is kept for ever, and other threads that are "
          "in a call of this module do not come back.");

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(
      module, "Backend", "torch.distributed's operations over a pycollective.Communicator.")
      .def(py::init(&make_backend), py::arg("communicator"), py::arg("threads"),
           py::arg("device_side"))
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def_property_readonly("communicator", &Backend::communicator,
                             "The communicator of calls with CPU tensors.")
      .def_property_readonly("device_side", &Backend::device_side,
                             "What makes the reductions of tensors on devices.");

  py::class_<ConnectThread>(
      module, "ConnectThread",
      "Connects to a TCPStore, or the ranks of a Gloo group, on a thread of its own. Given up, it "
      "leaves that thread behind, which needs no interpreter.")
      .def_static(
          "to_store",
          [](std::string host, std::uint16_t port, double timeout) {
            return ConnectThread::to_store(std::move(host), port, milliseconds_of(timeout));
          },
          py::arg("host"), py::arg("port"), py::arg("timeout"))
      .def_static("to_ranks", &ConnectThread::to_ranks, py::arg("alone"), py::arg("store"),
                  py::arg("rank"), py::arg("size"),
                  "All ranks with each other; `alone`: a Gloo group of one rank, with the devices "
                  "and the timeout of the new one.")
      .def(
          "wait",
          [](const ConnectThread& self, double seconds) {
            const pycollective::GilReleased unlocked;
            return self.wait(milliseconds_of(seconds));
          },
          py::arg("seconds"), "Whether it has ended.")
      .def("give_up", &ConnectThread::give_up)
      .def_property_readonly("absent", &ConnectThread::absent,
                             "Once it has failed: the ranks that were not there.")
      .def_property_readonly("store", &ConnectThread::store,
                             "Once it has ended; or raises why not.")
      .def(
          "link",
          [](ConnectThread& self) {
            using pycollective::kLinkCapsule;
            using pycollective::Link;
            auto* link = new std::shared_ptr<Link>(std::make_shared<GlooLink>(self.take_group()));
            return py::capsule(link, kLinkCapsule, [](PyObject* it) {
              delete static_cast<std::shared_ptr<Link>*>(PyCapsule_GetPointer(it, kLinkCapsule));
            });
          },
          "Once it has ended: a link over the group, in a capsule; or raises why not.");

  module.def(
      "average",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const py::object& bucket) {
        const auto tensor = bucket.cast<at::Tensor>();
        // DDP wants a Python object from a Python hook. Made here, so the completing thread needs
        // no GIL; chained in C++, so an error keeps its type.
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
