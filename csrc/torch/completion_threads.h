// Threads that complete futures, and with them run whatever was chained to these.
//
// A callback may itself wait for another collective's future (PowerSGD's hook does), so it must
// run neither on the core's progress thread nor behind another callback that waits.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace pycollective::shim {

class CompletionThreads {
 public:
  CompletionThreads();
  ~CompletionThreads();  // as close(), without waiting
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  // Runs `task` soon, on an idle thread or a new one; where all kMaxThreads are busy, after one of
  // them. The task must not throw. Where no thread can be had at all, and after close(), it runs
  // here. Thread-safe.
  void post(std::function<void()> task);

  // Lets what was posted run to its end, waiting at most `limit`, and ends the threads. Idempotent.
  // From a task it does not wait for that task; in a forked child it does nothing.
  void close(std::chrono::milliseconds limit);

  static constexpr int kMaxThreads = 64;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;  // each thread holds it too
};

}  // namespace pycollective::shim
