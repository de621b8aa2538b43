#include "bindings/objects.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "bindings/errors_py.h"
#include "bindings/gil.h"

namespace py = pybind11;

namespace pycollective {

AbandonedCalls::~AbandonedCalls() {
  sweep();
  // What is still under way writes into these arrays: they may never be freed.
  for (auto& [call, work] : calls_) call.release();
}

void AbandonedCalls::add(std::unique_ptr<Call> call, std::shared_ptr<Work> work) {
  calls_.emplace_back(std::move(call), std::move(work));
}

void AbandonedCalls::sweep() {
  const auto under_way = [](const auto& each) { return !each.second->done(); };
  const auto done = std::partition(calls_.begin(), calls_.end(), under_way);
  // Out of the list first: what frees an array may run Python, and so come here again.
  const decltype(calls_) over(std::make_move_iterator(done), std::make_move_iterator(calls_.end()));
  calls_.erase(done, calls_.end());
}

PythonWork::~PythonWork() {
  if (call_ && !work_->done()) abandoned_->add(std::move(call_), work_);
}

void PythonWork::finish() {
  if (!call_) return;
  const std::unique_ptr<Call> call = std::move(call_);
  if (work_->failure() == nullptr && !call->finish()) throw py::error_already_set();
}

bool PythonWork::done() {
  if (!work_->done()) return false;
  finish();
  return true;
}

py::object PythonWork::wait(double timeout) {
  const bool in_time = translated([&] {
    const GilReleased unlocked;
    return work_->wait(timeout, python_interrupts());
  });
  if (!in_time) {
    raise_failure(work_->ran_out(timeout));
    throw py::error_already_set();
  }
  finish();
  return receives_ ? py::cast(source()) : result_;
}

void bind_work(py::module_& module) {
  py::options options;
  options.disable_function_signatures();  // docstrings begin with shorter ones
  py::class_<PythonWork> type(
      module, "Work", py::is_final(),
      "A call that was made with async_op=True and is under way.\n\n"
      "Until wait() has returned, or done() has said True, its arrays are the call's: leave them "
      "alone.\nWork[T], for type checkers, is one whose wait() returns a T.");
  // So that Work[...] can be written where annotations are evaluated.
  type.attr("__class_getitem__") = py::reinterpret_steal<py::object>(
      PyClassMethod_New(py::module_::import("types").attr("GenericAlias").ptr()));
  type.def("done", &PythonWork::done,
           "done() -> bool\n\nWhether the call has ended, well or badly; does not block.")
      .def_property_readonly("source", &PythonWork::source,
                             "The rank that sent the message, of a recv that has ended well; else "
                             "None.")
      .def(
          "wait",
          [](PythonWork& self, std::optional<double> timeout) {
            if (timeout && *timeout <= 0) {
              if (self.done()) return self.wait(0);
              *timeout = 1e-9;
            }
            return self.wait(timeout.value_or(0));
          },
          py::arg("timeout") = py::none(),
          R"(wait(timeout: float | None = None) -> object

Block until the call is done; it may be called again.

Args:
    timeout: seconds to wait at most; None for as long as the communicator's timeout allows the
        call.

Returns:
    What the call returns without async_op, the array that holds the result, the rank that a recv
    received from, or None.

Raises:
    CollectiveTimeout: ``timeout`` ran out. The call goes on.
    CollectiveError: the call failed. A call on a GPU's stream is done once it is launched; where
        its communicator has failed since, this is raised too.)");
}

}  // namespace pycollective
