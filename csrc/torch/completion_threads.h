// Threads that complete futures and run their callbacks.
//
// A callback may wait for another collective's future (PowerSGD's hook does). So it runs neither on
// the core's progress thread nor behind another callback that waits.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

namespace pycollective::shim {

class CompletionThreads {
 public:
  // `rank`: this rank in the group. `limit`: how long the end of the process waits for them.
  CompletionThreads(int rank, std::chrono::milliseconds limit);
  ~CompletionThreads();  // as close(), without waiting
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  // Runs `task` soon on an idle thread or a new one. If all kMaxThreads are busy, it waits for one
  // of them; if no thread can be started at all, it runs here. It works after close(), too. Once
  // the process exits, the task is leaked: what it holds may need the interpreter. The task must
  // not throw. Thread-safe.
  void post(std::function<void()> task);

  // Waits at most `limit` for the posted tasks, and ends the threads. Idempotent. From a task it
  // does not wait for that task; in a forked child it does nothing. It says on stderr when it waits
  // long.
  void close(std::chrono::milliseconds limit);

  // Counts calls under way: their ends may post tasks.
  void call_begins() { calls_->fetch_add(1, std::memory_order_relaxed); }
  void call_ends() { calls_->fetch_sub(1, std::memory_order_relaxed); }

  // Whether any object of this process has a call or a task under way. The caller holds the GIL.
  static bool any_busy();
  // Closes all objects of this process, each with its own limit; releases the GIL while it waits.
  static void end_all();

  static constexpr int kMaxThreads = 64;

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  static void close(State& state, std::chrono::milliseconds limit);

  std::shared_ptr<State> state_;  // each thread holds it too
  std::atomic<int>* calls_;       // in state_
};

}  // namespace pycollective::shim
