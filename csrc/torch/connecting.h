// Connecting to a store, or the ranks of a Gloo group to each other, on a thread of its own: both
// wait in torch without looking at signals, for as long as a rank that has died is waited for.
//
// The thread needs no interpreter, and what it touches it owns, so it may be given up and left
// behind: it ends at its next look into the store, or when what it waits for has its time-out.
//
// The Gloo group is made by another, of one rank, which Python makes: torch's wheel holds none of
// Gloo's own headers, which c10d's header for Gloo includes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace pycollective::shim {

class Connecting {
 public:
  // With a TCPStore that is served elsewhere.
  static std::unique_ptr<Connecting> to_store(std::string host, std::uint16_t port,
                                              std::chrono::milliseconds timeout);
  // All `size` ranks with each other. `alone`: a Gloo group of one rank, with the devices and the
  // timeout that the new one is to have. Each rank says in the store that it is here before.
  static std::unique_ptr<Connecting> to_ranks(c10::intrusive_ptr<c10d::Backend> alone,
                                              c10::intrusive_ptr<c10d::Store> store, int rank,
                                              int size);
  ~Connecting() { give_up(); }
  Connecting(const Connecting&) = delete;
  Connecting& operator=(const Connecting&) = delete;

  // Whether it has ended, one way or the other.
  bool wait(std::chrono::milliseconds limit) const;
  void give_up() noexcept;

  // Once it has ended: what came of it; throws what it failed with.
  c10::intrusive_ptr<c10d::Store> store() const;
  c10::intrusive_ptr<c10d::Backend> take_group();
  // After a failure: the ranks that have not said that they are here, the first of them.
  const std::vector<int>& absent() const;

 private:
  struct State;
  explicit Connecting(std::shared_ptr<State> state) : state_(std::move(state)) {}
  // Throws std::system_error where no thread can be had.
  static std::unique_ptr<Connecting> begin(const std::shared_ptr<State>& state,
                                           std::function<void()> act);

  std::shared_ptr<State> state_;  // the thread holds it too
};

}  // namespace pycollective::shim
