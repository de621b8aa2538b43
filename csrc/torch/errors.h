// The core's failures as torch sees them: the typed Python exceptions of pycollective.errors.
//
// They travel as torch's python_error. Its bindings, futures and autograd engine carry that between
// threads and turn it back into the same Python exception. So `except pc.PeerFailure` works around
// dist.all_reduce, work.wait(), future.wait() and loss.backward() alike.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "engine/api.h"
#include "torch/process_exit.h"

namespace pycollective::shim {

// Takes the GIL. While the interpreter finalizes it gives the C++ exception instead.
std::exception_ptr typed_exception(const Failure& failure);

// Wraps a Python exception likewise. The caller holds the GIL.
std::exception_ptr carried_exception(PyObject* exception);

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
