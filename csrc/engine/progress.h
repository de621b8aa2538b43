// The thread that carries on what was issued asynchronously: one a process, for all communicators.
//
// Started by the first asynchronous operation that does not finish at once; it blocks at the
// process's doorbell whenever nothing can be done.
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

  // Carries on `communicator` until it has nothing pending. Thread-safe; not under its lock.
  void carry_on(const std::shared_ptr<Communicator>& communicator);

  // Whether there is a thread that does.
  bool runs() const;

  // In which all communicators launch on GPUs.
  const std::shared_ptr<LaunchOrder>& launch_order() const { return launch_order_; }

  // Ends the thread for good, and returns when it has ended; whoever waits then drives. For the end
  // of the process. Not by two threads at once; in a forked child it does nothing.
  void stop();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<LaunchOrder> launch_order_ = std::make_shared<LaunchOrder>();
  std::shared_ptr<State> state_;  // the thread's own share keeps it until the thread ends
  std::thread thread_;
};

}  // namespace pycollective
