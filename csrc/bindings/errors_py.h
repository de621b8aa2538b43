// From the core's failures to pycollective.errors.
//
//   kPeerFailure -> PeerFailure       kMismatch -> CollectiveMismatch
//   kTimeout -> CollectiveTimeout     kAborted -> CollectiveAborted
//   kConfiguration, std::invalid_argument, std::system_error -> ConfigurationError
#pragma once

#include <Python.h>

#include "engine/api.h"

namespace pycollective {

// Both set the Python error; the GIL is held.
void raise_failure(const Failure& failure);
void raise_configuration_error(const char* format, ...);  // PyErr_Format's conversions

// To be called in a catch block: translates what was thrown. A Python error that is already set
// (KeyboardInterrupt from a blocked call) stays.
void raise_current_exception();

// Once, when the module is made. False with a Python error set.
bool init_errors();

// Asks Python for signals (Ctrl-C), from a thread that has released the GIL.
const InterruptHook& python_interrupts();

}  // namespace pycollective
