// Gloo between hosts: how ranks connect, and messages over a c10d backend that sends and receives.
//
// c10d reports the end of a message only to a thread that waits for it. So each lane (a peer, a
// number, a direction) with an awaited message has a thread that waits for its first; idle threads
// serve the next lane. A wait ends with the message, the connection or an abort. It never ends by a
// timeout, which would fail every pair of Gloo's.
//
// Gloo gives memory back when the work that holds it is destroyed, if need be after the read under
// way. That is the end of a cancelled message; so every cancelled message ends.
//
// If no thread can be started, a lane waits for a free one. After a second without one progress()
// throws std::system_error; the very first message throws it at once.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/internode/link.h"

namespace pycollective::shim {

// Connects to a store, or the ranks of a Gloo group to each other, on a thread of its own. Torch
// waits there without looking at signals, as long as its timeout even for a rank that has died.
//
// The thread needs no interpreter and owns what it touches. So its caller may give it up and leave
// it behind; it ends at its next poll of the store, or at its timeout.
//
// A Gloo group of one rank, which Python makes, makes the group of all: torch's wheel lacks Gloo's
// own headers, which c10d's header for Gloo includes.
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

// It does nothing in a forked child.
class GlooLink final : public Link {
 public:
  // `group`: used by nobody else; it has all ranks of the communicator.
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> group);
  ~GlooLink() override;

  Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool awaited) override;
  Transfer receive(int rank, int lane, void* data, std::size_t capacity) override;
  // Gloo's own threads move messages. This checks that there are threads to see their ends.
  void progress() override;
  Outcome test(Transfer transfer) override;
  void cancel(Transfer transfer) noexcept override;
  std::optional<Loss> lost() override;
  bool wake_with(std::function<void()> wake) override;
  void close(bool quiet) noexcept override;

 private:
  struct State;
  std::shared_ptr<State> state_;  // each thread holds it too
};

}  // namespace pycollective::shim
