#include "torch/ending.h"

#include <atomic>
#include <thread>

#include "bindings/gil.h"
#include "per_process.h"

namespace pycollective::shim {
namespace {

struct OthersEnd {
  std::atomic<bool> come{false};
  std::thread::id ends_process;  // written before
};
// Asked for by threads that live longer than what the end of the process destroys. A fork that is
// made after its parent's end has an end of its own, whichever of its parent's threads made it.
PerProcess<OthersEnd> others_end;

}  // namespace

void end_other_threads() {
  OthersEnd& end = *others_end;
  if (end.come) return;
  end.ends_process = std::this_thread::get_id();
  end.come = true;
}

bool others_have_ended() { return others_end->come; }

void StopsAtTheEnd::stop_if_ended() {
  const OthersEnd& end = *others_end;
  if (end.come.load(std::memory_order_acquire) && std::this_thread::get_id() != end.ends_process)
    stop_for_good();
}

}  // namespace pycollective::shim
