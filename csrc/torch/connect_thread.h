// Connects to a store, or the ranks of a Gloo group to each other, on a thread of its own. Torch
// waits there without looking at signals, as long as its timeout even for a rank that has died.
//
// The thread needs no interpreter and owns what it touches. So its caller may give it up and leave
// it behind; it ends at its next poll of the store, or at its timeout.
//
// A Gloo group of one rank, which Python makes, makes the group of all: torch's wheel lacks Gloo's
// own headers, which c10d's header for Gloo includes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pycollective::shim {

class ConnectThread {
 public:
  // Connects to a TCPStore that another process serves.
  static std::unique_ptr<ConnectThread> to_store(std::string host, std::uint16_t port,
                                                 std::chrono::milliseconds timeout);
  // Connects all `size` ranks with each other. `alone`: a Gloo group of one rank, with the devices
  // and the timeout of the new one. Each rank first writes to the store that it is here.
  static std::unique_ptr<ConnectThread> to_ranks(c10::intrusive_ptr<c10d::Backend> alone,
                                                 c10::intrusive_ptr<c10d::Store> store, int rank,
                                                 int size);
  ~ConnectThread() { give_up(); }
  ConnectThread(const ConnectThread&) = delete;
  ConnectThread& operator=(const ConnectThread&) = delete;

  // Whether it has ended, one way or the other.
  bool wait(std::chrono::milliseconds limit) const;
  void give_up() noexcept;

  // The result, once it has ended; throws the error of a failure.
  c10::intrusive_ptr<c10d::Store> store() const;
  c10::intrusive_ptr<c10d::Backend> take_group();
  // After a failure: the ranks that have not written that they are here; the first kMostAbsent.
  const std::vector<int>& absent() const;

 private:
  struct State;
  explicit ConnectThread(std::shared_ptr<State> state) : state_(std::move(state)) {}
  // Throws std::system_error if no thread can be started.
  static std::unique_ptr<ConnectThread> begin(const std::shared_ptr<State>& state,
                                              std::function<void()> act);

  std::shared_ptr<State> state_;  // the thread holds it too
};

}  // namespace pycollective::shim
