#include "bindings/errors_py.h"

#include <pybind11/pybind11.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdarg>
#include <stdexcept>
#include <system_error>

#include "bindings/gil.h"

namespace pycollective {
namespace {

// The classes live as long as the module that the interpreter keeps.
struct ErrorClasses {
  PyObject* peer_failure;
  PyObject* timeout;
  PyObject* mismatch;
  PyObject* aborted;
  PyObject* configuration;
};
ErrorClasses classes;

PyObject* class_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::kPeerFailure:
      return classes.peer_failure;
    case FailureKind::kTimeout:
      return classes.timeout;
    case FailureKind::kMismatch:
      return classes.mismatch;
    case FailureKind::kConfiguration:
      return classes.configuration;
    default:
      return classes.aborted;
  }
}

// Of each thread; one that polls a link asks more often than that.
constexpr std::chrono::milliseconds kBetweenLooks{50};

// Whether nobody waits any more for what this thread does: asks pycollective.bootstrap.shutdown.
bool is_abandoned_by_asyncio() {
  static thread_local std::chrono::steady_clock::time_point next_look;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look) return false;
  next_look = now + kBetweenLooks;
  PyObject* name = PyUnicode_FromString("pycollective.bootstrap.shutdown");
  PyObject* module = name != nullptr ? PyImport_GetModule(name) : nullptr;
  PyObject* answer =
      module != nullptr ? PyObject_CallMethod(module, "is_abandoned_by_asyncio", nullptr) : nullptr;
  const bool abandoned = answer != nullptr && PyObject_IsTrue(answer) == 1;
  Py_XDECREF(answer);
  Py_XDECREF(module);
  Py_XDECREF(name);
  // On the main thread it is what the handler of a signal raises that came meanwhile.
  return abandoned || PyErr_Occurred() != nullptr;
}

}  // namespace

bool init_errors() {
  PyObject* module = PyImport_ImportModule("pycollective.errors");
  if (module == nullptr) return false;
  classes.peer_failure = PyObject_GetAttrString(module, "PeerFailure");
  classes.timeout = PyObject_GetAttrString(module, "CollectiveTimeout");
  classes.mismatch = PyObject_GetAttrString(module, "CollectiveMismatch");
  classes.aborted = PyObject_GetAttrString(module, "CollectiveAborted");
  classes.configuration = PyObject_GetAttrString(module, "ConfigurationError");
  Py_DECREF(module);
  return classes.peer_failure && classes.timeout && classes.mismatch && classes.aborted &&
         classes.configuration;
}

void raise_failure(const Failure& failure) {
  PyObject* type = class_of(failure.kind);
  if (failure.kind == FailureKind::kConfiguration) {
    PyErr_SetString(type, failure.message.c_str());
    return;
  }
  PyObject* error = PyObject_CallFunction(type, "sisK", failure.message.c_str(), failure.rank,
                                          failure.names_operation() ? name_of(failure.op) : "",
                                          static_cast<unsigned long long>(failure.sequence));
  if (error == nullptr) return;
  PyErr_SetObject(type, error);
  Py_DECREF(error);
}

void raise_configuration_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  PyErr_FormatV(classes.configuration, format, arguments);
  va_end(arguments);
}

void raise_current_exception() {
  if (PyErr_Occurred()) return;
  try {
    throw;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const CollectiveFailure& error) {
    raise_failure(error.failure());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::system_error& error) {
    // pycollective.system_limits.described has the same words for Python's OSError.
    rlimit limit{};
    if (error.code() == std::errc::too_many_files_open && getrlimit(RLIMIT_NOFILE, &limit) == 0)
      raise_configuration_error("%s: this process may have %llu, raise its limit (ulimit -n)",
                                error.what(), static_cast<unsigned long long>(limit.rlim_cur));
    else
      raise_configuration_error("%s", error.what());
  } catch (const std::exception& error) {
    raise_configuration_error("%s", error.what());
  }
}

const InterruptHook& python_interrupts() {
  static const InterruptHook hook = [] {
    const GilHeld gil;
    return PyErr_CheckSignals() != 0 || is_abandoned_by_asyncio();
  };
  return hook;
}

}  // namespace pycollective
