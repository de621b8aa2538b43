#include "bindings/work_py.h"

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

void PythonWork::wait(double timeout) {
  bool in_time = false;
  try {
    const GilReleased unlocked;
    in_time = work_->wait(timeout, python_interrupts());
  } catch (const std::exception&) {
    raise_current_exception();
    throw py::error_already_set();
  }
  if (!in_time) {
    raise_failure(work_->ran_out(timeout));
    throw py::error_already_set();
  }
  finish();
}

void bind_work(py::module_& module) {
  py::class_<PythonWork>(module, "Work", py::is_final(),
                         "An operation under way. Its arrays must not be touched, and results are "
                         "in place, only once wait() has returned or done() has said True.")
      .def("done", &PythonWork::done, "Whether the operation has ended, well or badly.")
      .def_property_readonly("source", &PythonWork::source,
                             "Of a recv that has ended well: the rank that sent the message. None "
                             "of anything else.")
      .def(
          "wait",
          [](PythonWork& self, std::optional<double> timeout) {
            if (timeout && *timeout <= 0) {
              if (self.done()) return self.wait(0);
              *timeout = 1e-9;
            }
            self.wait(timeout.value_or(0));
          },
          py::arg("timeout") = py::none(),
          "Block until the operation is done, at most `timeout` seconds.\n\n"
          "Raises the operation's CollectiveError if it failed, and CollectiveTimeout if the time "
          "ran out, in which case the operation goes on. A call on a GPU's stream is done once it "
          "is "
          "launched; if its communicator has failed since, wait raises that.");
}

}  // namespace pycollective
