// Keeps other threads out of torch's frames while the process exits.
//
// Those frames take the interpreter's lock in destructors. A thread that does so while the
// interpreter finalizes takes the process down (bindings/gil.h). So from the end of the exit
// handlers on, only the exiting thread returns from calls of this module.
#pragma once

namespace pycollective::shim {

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

}  // namespace pycollective::shim
