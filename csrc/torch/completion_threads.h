// Threads that complete futures, and with them run whatever was chained to these.
//
// A callback may itself wait for another collective's future (PowerSGD's hook does), so it must
// run neither on the core's progress thread nor behind another callback that waits.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

namespace pycollective::shim {

class CompletionThreads {
 public:
  // Of the group in which this is `rank`. `limit`: how long the end of the process waits for them.
  CompletionThreads(int rank, std::chrono::milliseconds limit);
  ~CompletionThreads();  // as close(), without waiting
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  // Runs `task` soon, on an idle thread or a new one; where all kMaxThreads are busy, after one of
  // them; where no thread can be had at all, here. After close() too; but at the end of the process
  // it keeps the task for ever, as what it holds may need the interpreter. The task must not throw.
  // Thread-safe.
  void post(std::function<void()> task);

  // Lets what was posted run to its end, waiting at most `limit`, and ends the threads. Idempotent.
  // From a task it does not wait for that task; in a forked child it does nothing. A long wait is
  // told on stderr.
  void close(std::chrono::milliseconds limit);

  // Calls under way, whose ends may post something.
  void call_begins() { calls_->fetch_add(1, std::memory_order_relaxed); }
  void call_ends() { calls_->fetch_sub(1, std::memory_order_relaxed); }

  // Of all objects of this process. The GIL is held, and given back while end_all waits.
  static bool any_busy();
  // Closes all, each with its own limit.
  static void end_all();

  static constexpr int kMaxThreads = 64;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  static void close(State& state, std::chrono::milliseconds limit);

  std::shared_ptr<State> state_;  // each thread holds it too
  std::atomic<int>* calls_;       // in it
};

}  // namespace pycollective::shim
