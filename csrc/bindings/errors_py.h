// From the core's failures to pycollective.errors.
//
//   kPeerFailure -> PeerFailure       kMismatch -> CollectiveMismatch
//   kTimeout -> CollectiveTimeout     kAborted -> CollectiveAborted
//   kConfiguration, std::invalid_argument, std::system_error -> ConfigurationError
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <utility>

#include "engine/api.h"

namespace pycollective {

// Both set the Python error; the GIL is held.
void raise_failure(const Failure& failure);
void raise_configuration_error(const char* format, ...);  // PyErr_Format's conversions

// To be called in a catch block: translates what was thrown. A Python error that is already set
// (KeyboardInterrupt from a blocked call) stays.
void raise_current_exception();

// Runs `act`; what it throws becomes the Python error. What pybind11 throws stays as it is.
template <class Act>
auto translated(const Act& act) {
  try {
    return act();
  } catch (const pybind11::error_already_set&) {
    throw;
  } catch (...) {
    raise_current_exception();
    throw pybind11::error_already_set();
  }
}

// The function for pybind11, translated.
template <class Result, class... Arguments>
auto or_raise(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) -> Result {
    return translated([&]() -> Result { return function(std::forward<Arguments>(arguments)...); });
  };
}

// Once, when the module is made. False with a Python error set.
bool init_errors();

// Asks Python for signals (Ctrl-C), from a thread that has released the GIL; and whether asyncio
// has given up what the thread does.
const InterruptHook& python_interrupts();

}  // namespace pycollective
