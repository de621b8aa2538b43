// The core's failures as torch sees them: the typed Python exceptions of pycollective.errors.
//
// They travel as torch's python_error. Its bindings, futures and autograd engine carry that between
// threads and turn it back into the same Python exception. So `except pc.PeerFailure` works around
// dist.all_reduce, work.wait(), future.wait() and loss.backward() alike.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "engine/api.h"

namespace pycollective::shim {

// Keeps other threads out of torch's frames while the process exits.
//
// Those frames take the interpreter's lock in destructors. A thread that does so while the
// interpreter finalizes takes the process down (bindings/gil.h). So from the end of the exit
// handlers on, only the exiting thread returns from calls of this module.
//
// The exiting thread calls this. From now on other threads stop for good at a StopsAtExit.
void stop_other_threads();
// Whether it has been called; then Python objects are leaked rather than freed.
bool other_threads_stop();

// Stops other threads at its construction and destruction, once the process exits.
class StopsAtExit {
 public:
  StopsAtExit() { stop_if_exiting(); }
  ~StopsAtExit() { stop_if_exiting(); }
  StopsAtExit(const StopsAtExit&) = delete;
  StopsAtExit& operator=(const StopsAtExit&) = delete;

 private:
  static void stop_if_exiting();
};

// Takes the GIL. While the interpreter finalizes it gives the C++ exception instead.
std::exception_ptr typed_exception(const Failure& failure);

// Wraps a Python exception likewise, or one that pybind11 has caught. The caller holds the GIL.
std::exception_ptr carried_exception(PyObject* exception);
std::exception_ptr carried_exception(pybind11::error_already_set caught);

// Loads the error classes, and registers python_error with pybind11.
void init_typed_exceptions();

// Call it in a catch block.
[[noreturn]] void rethrow_typed();

const InterruptHook& interrupts();

// Calls `collective` with a hook that looks for Ctrl-C, and makes its failure a typed exception.
// The caller does not hold the GIL.
template <class Collective>
auto typed(const Collective& collective) {
  const StopsAtExit stops;
  try {
    return collective(interrupts());
  } catch (const CollectiveFailure&) {
    rethrow_typed();
  }
}

}  // namespace pycollective::shim
