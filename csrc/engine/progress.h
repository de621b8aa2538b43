// The progress thread: it drives asynchronous operations, one thread a process for all
// communicators.
//
// The first asynchronous operation that does not finish at once starts it. It sleeps at the
// process's doorbell (a futex) whenever it can do nothing.
#pragma once

#include <memory>
#include <thread>

#include "engine/gpu/launch_order.h"
#include "shared_memory/node.h"

namespace pycollective {

class Communicator;

class Progress {
 public:
  explicit Progress(std::shared_ptr<Node> node);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Drives `communicator` until it has nothing pending. Thread-safe. Requires its mutex_ not held.
  void carry_on(const std::shared_ptr<Communicator>& communicator);

  // Whether the thread runs.
  bool runs() const;
  // Whether its thread looks for something to do, or does it.
  bool awake() const;

  // The order in which all communicators launch on GPUs.
  const std::shared_ptr<LaunchOrder>& launch_order() const { return launch_order_; }

  // Ends the thread for good and waits for it; waiting callers drive from then on. For the end of
  // the process. Not by two threads at once; does nothing in a forked child.
  void stop();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<LaunchOrder> launch_order_ = std::make_shared<LaunchOrder>();
  std::shared_ptr<State> state_;  // the thread holds it, too
  std::thread thread_;
};

}  // namespace pycollective
