// The end of the process, for threads that would come back into torch's frames.
//
// Those frames take the interpreter's lock in destructors: a thread that does it while the
// interpreter is ending takes the process down (bindings/gil.h). So once everything has been said
// and done, no thread but the one that ends the process comes back from here.
#pragma once

namespace pycollective::shim {

// From now on; called by the thread that ends the process.
void end_other_threads();
// Whether that has been called: whoever holds Python objects keeps them.
bool others_have_ended();

// Stops any other thread for good that comes by, in or out, after that.
class StopsAtTheEnd {
 public:
  StopsAtTheEnd() { stop_if_ended(); }
  ~StopsAtTheEnd() { stop_if_ended(); }
  StopsAtTheEnd(const StopsAtTheEnd&) = delete;
  StopsAtTheEnd& operator=(const StopsAtTheEnd&) = delete;

 private:
  static void stop_if_ended();
};

}  // namespace pycollective::shim
