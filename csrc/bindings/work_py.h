// What an asynchronous call returns to Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/call.h"
#include "engine/api.h"

namespace pycollective {

// Calls whose handle was dropped while they were under way. Their arrays must live until they are
// done, and only a thread with the GIL may free them. Later calls sweep them. GIL held.
class AbandonedCalls {
 public:
  ~AbandonedCalls();
  void add(std::unique_ptr<Call> call, std::shared_ptr<Work> work);
  void sweep();

 private:
  std::vector<std::pair<std::unique_ptr<Call>, std::shared_ptr<Work>>> calls_;
};

// Owns the call's arrays until it is done.
class PythonWork {
 public:
  // `result`: what the call would return without async_op; a recv returns its source.
  PythonWork(std::unique_ptr<Call> call, std::shared_ptr<Work> work,
             std::shared_ptr<AbandonedCalls> abandoned, pybind11::object result)
      : receives_(call->request().kind == OpKind::kRecv),
        call_(std::move(call)),
        work_(std::move(work)),
        abandoned_(std::move(abandoned)),
        result_(std::move(result)) {}
  ~PythonWork();

  bool done();
  pybind11::object wait(double timeout);
  // The rank that sent the message of a recv that has ended well; else none.
  std::optional<int> source() const {
    const int rank = receives_ ? work_->source() : kAnySource;
    return rank == kAnySource ? std::nullopt : std::optional<int>(rank);
  }

 private:
  void finish();

  const bool receives_;
  std::unique_ptr<Call> call_;  // null once the output is where it belongs
  std::shared_ptr<Work> work_;
  std::shared_ptr<AbandonedCalls> abandoned_;
  const pybind11::object result_;
};

}  // namespace pycollective
