// The core's objects as Python holds them, for the files that bind them.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/call.h"
#include "bindings/errors_py.h"
#include "engine/api.h"
#include "engine/communicator.h"
#include "engine/internode/link.h"
#include "engine/plans/program.h"
#include "engine/progress.h"
#include "shared_memory/node.h"

namespace pycollective {

// Tokens travel through Python as 16 bytes.
Token token_from_bytes(const std::string& bytes);

// Python's Node: the node itself, the thread that serves its communicators, and the mailboxes that
// were allocated and not yet given to a communicator.
class NodeHandle {
 public:
  NodeHandle();

  MailboxRange allocate(int ranks, bool internode);
  // The mailbox at `offset`, which is the caller's from now on.
  MailboxRange take(std::size_t offset);
  // Gives back a mailbox that was not taken.
  void release(std::size_t offset);

  const std::shared_ptr<Node> node;
  const std::shared_ptr<Progress> progress;

 private:
  std::mutex mutex_;
  std::map<std::size_t, MailboxRange> allocated_;
};

// The link in a capsule, in which Python passes it from the library that makes it to the core.
// Throws pybind11::error_already_set if there is none.
std::shared_ptr<Link> link_in(const pybind11::object& capsule);

struct ProgramHandle {
  std::shared_ptr<const Program> program;
};

// Has `planner` (pycollective.planning.planner.Planner) make plans, from any thread, and choose
// where it `chooses`. What it raises is a CollectiveFailure (kConfiguration).
PlanCache::Source plan_source(pybind11::object planner, bool chooses);

// Register what shutdown must end; both keep no share of it. It may outlive its Python object while
// operations are pending. GIL held.
void remember(const std::shared_ptr<Communicator>& communicator);
void remember(const std::shared_ptr<Progress>& progress);

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

// What an asynchronous call returns to Python. Owns the call's arrays until it is done.
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

// The Python object of a communicator, for the files that implement its type.
struct CommunicatorObject {
  PyObject_HEAD std::shared_ptr<Communicator>* core;
  std::shared_ptr<AbandonedCalls>* abandoned;
  std::shared_ptr<KeptArrays>* kept;

  static CommunicatorObject& of(PyObject* self) {
    return *reinterpret_cast<CommunicatorObject*>(self);
  }
  // nullptr with a Python error set where __init__ has not run.
  static Communicator* core_of(PyObject* self) {
    if (of(self).core == nullptr) {
      raise_configuration_error("the communicator was never initialised");
      return nullptr;
    }
    return of(self).core->get();
  }
};

// The collectives as methods. The type adds its own, and an empty one as the end.
constexpr int kCollectiveMethods = 11;
extern const PyMethodDef collective_methods[kCollectiveMethods];
// _reduce_leaves(reduction): of accumulators (pycollective.leaves.reduction.Reduction).
PyObject* reduce_leaves(PyObject* self, PyObject* reduction);

// Both carry out a call that is prepared, and return null with a Python error set where it fails.
// To its end; returns `result`, or the source of a recv.
PyObject* run_prepared(CommunicatorObject& self, Call& call, PyObject* result);
// In the background; returns a Work of `result`.
PyObject* start_prepared(CommunicatorObject& self, std::unique_ptr<Call> call, PyObject* result);

}  // namespace pycollective
