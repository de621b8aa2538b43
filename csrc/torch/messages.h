// Messages between hosts over a c10d backend that sends and receives (Gloo), as the core asks a
// pump for them (pycollective/transport/pump.py).
//
// c10d tells that a message has gone or come only to a thread that waits for it. So each lane (one
// peer, one tag, one direction) that is not empty has a thread that waits for its first; threads
// are kept for the next lane. A standing receive from every peer takes its notices, and sees its
// connection close: a peer that dies is named at once.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/link.h"

namespace pycollective::shim {

// Thread-safe. In a forked child it does nothing.
class Messages {
 public:
  using Ticket = std::uint64_t;
  using Notice = std::tuple<int, int, std::string>;  // kind of failure, reporter, report
  using News = std::tuple<std::vector<Ticket>, std::vector<Notice>>;

  // `group`: its own, and all of the communicator's ranks; `far`: those of other hosts.
  Messages(c10::intrusive_ptr<c10d::Backend> group, std::vector<int> far);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  Ticket isend(int rank, int tag, const void* data, std::size_t bytes);
  Ticket irecv(int rank, int tag, void* data, std::size_t bytes);
  std::optional<News> poll();
  // `bell` is rung whenever there is news, from other threads.
  void ring_with(Bell bell);
  void give_up(const std::vector<Ticket>& tickets);
  void tell(int kind, const std::string& report);
  void close();

 private:
  struct State;
  std::shared_ptr<State> state_;  // each thread holds it too
};

}  // namespace pycollective::shim
