// Releases and takes the interpreter's lock so that no thread dies of it.
//
// Once the interpreter is ending, a thread that asks for the lock never gets it. Up to Python 3.13
// it is ended where it stands, by unwinding its stack. That runs destructors which touch Python
// objects without the lock, and a destructor or a `catch (...)` ends the process with SIGABRT. Here
// such a thread stops for good and keeps what it holds, as it does from Python 3.14 on.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace pycollective {

[[noreturn]] inline void stop_for_good() {
  for (;;) pause();
}

// For a thread that has the lock: gives it back for as long as this lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      stop_for_good();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// For any thread: holds the lock for as long as this lives. Not once there is no interpreter.
class GilHeld {
 public:
  GilHeld() {
    try {
      state_ = PyGILState_Ensure();
    } catch (abi::__forced_unwind&) {
      stop_for_good();
    }
  }
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace pycollective
