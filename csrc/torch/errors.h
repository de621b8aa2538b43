// The core's failures as torch sees them: the typed Python exceptions of pycollective.errors.
//
// They travel as torch's own python_error, which its bindings, futures and autograd engine carry
// between threads and turn back into the very Python exception. So `except pc.PeerFailure` works
// around dist.all_reduce, work.wait(), future.wait() and loss.backward() alike.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "engine/api.h"
#include "torch/ending.h"

namespace pycollective::shim {

// Takes the GIL. Once the interpreter is ending there is no Python exception to make: then it is
// the C++ one.
std::exception_ptr typed_exception(const Failure& failure);

// A Python exception as one that travels so. The caller holds the GIL.
std::exception_ptr carried_exception(PyObject* exception);

// For the module: loads the classes, and teaches pybind11 what python_error is.
void init_typed_exceptions();

// In a catch block.
[[noreturn]] void rethrow_typed();

const InterruptHook& interrupts();

// Calls `collective` with a hook that looks for Ctrl-C; what it throws comes out typed. The caller
// does not hold the GIL. At the end of the process other threads do not come back.
template <class Collective>
auto typed(const Collective& collective) {
  const StopsAtTheEnd stops;
  try {
    return collective(interrupts());
  } catch (const CollectiveFailure&) {
    rethrow_typed();
  }
}

}  // namespace pycollective::shim
