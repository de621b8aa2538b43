#include "torch/errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <atomic>
#include <thread>

#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "per_process.h"

namespace py = pybind11;

namespace pycollective::shim {
namespace {

struct ProcessExit {
  std::atomic<bool> begun{false};
  std::thread::id thread;  // that exits; written before `begun`
};
// Never destroyed: threads outlive static objects. A fork made during its parent's exit has its
// own.
PerProcess<ProcessExit> process_exit;

}  // namespace

void stop_other_threads() {
  ProcessExit& exit = *process_exit;
  if (exit.begun) return;
  exit.thread = std::this_thread::get_id();
  exit.begun = true;
}

bool other_threads_stop() { return process_exit->begun; }

void StopsAtExit::stop_if_exiting() {
  const ProcessExit& exit = *process_exit;
  if (exit.begun.load(std::memory_order_acquire) && std::this_thread::get_id() != exit.thread)
    stop_for_good();
}

namespace {

// Takes the Python error that is set.
std::exception_ptr carry_python_error() {
  python_error error;
  error.persist();
  return std::make_exception_ptr(std::move(error));
}

}  // namespace

std::exception_ptr typed_exception(const Failure& failure) {
  if (Py_IsFinalizing()) return std::make_exception_ptr(CollectiveFailure(failure));
  const GilHeld gil;
  raise_failure(failure);
  return carry_python_error();
}

std::exception_ptr carried_exception(PyObject* exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
  return carry_python_error();
}

std::exception_ptr carried_exception(py::error_already_set caught) {
  caught.restore();
  return carry_python_error();
}

void rethrow_typed() {
  if (Py_IsFinalizing()) throw;
  std::exception_ptr error;
  {
    const GilHeld gil;
    raise_current_exception();  // or the KeyboardInterrupt that ended the call
    error = carry_python_error();
  }
  std::rethrow_exception(error);
}

const InterruptHook& interrupts() { return python_interrupts(); }

void init_typed_exceptions() {
  if (!init_errors()) throw py::error_already_set();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    } catch (const CollectiveFailure& error) {
      raise_failure(error.failure());
    }
  });
}

}  // namespace pycollective::shim
