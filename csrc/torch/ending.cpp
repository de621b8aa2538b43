#include "torch/ending.h"

#include <atomic>
#include <thread>

#include "bindings/gil.h"

namespace pycollective::shim {
namespace {

std::atomic<bool> ended{false};
std::thread::id ends_process;

}  // namespace

void end_other_threads() {
  if (ended) return;
  ends_process = std::this_thread::get_id();
  ended = true;
}

bool others_have_ended() { return ended; }

void StopsAtTheEnd::stop_if_ended() {
  if (ended.load(std::memory_order_acquire) && std::this_thread::get_id() != ends_process)
    stop_for_good();
}

}  // namespace pycollective::shim
