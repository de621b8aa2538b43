#include "torch/process_exit.h"

#include <atomic>
#include <thread>

#include "bindings/gil.h"
#include "per_process.h"

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

}  // namespace pycollective::shim
