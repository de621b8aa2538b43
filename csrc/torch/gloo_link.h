// Messages between hosts over a c10d backend that sends and receives (Gloo).
//
// c10d tells that a message has gone or come only to a thread that waits for it. So each lane (one
// peer, one number, one direction) on which an end is awaited has a thread that waits for its
// first; threads are kept for the next lane. A wait is ended by the message, by the end of the
// connection, or by an abort; never by a time-out, which would fail every pair of Gloo's.
//
// Gloo lets go of memory at the end of the work that holds it, if need be after what it is reading
// at that moment: that is when a cancelled message has ended. So every cancelled message ends.
//
// A lane for which no thread can be started waits for one that comes free. Where none does within a
// second, progress() throws std::system_error; the first message of all throws it at once.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <optional>

#include "engine/internode/link.h"

namespace pycollective::shim {

// In a forked child it does nothing.
class GlooLink final : public Link {
 public:
  // `group`: its own, and all of the communicator's ranks.
  explicit GlooLink(c10::intrusive_ptr<c10d::Backend> group);
  ~GlooLink() override;

  Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool awaited) override;
  Transfer receive(int rank, int lane, void* data, std::size_t capacity) override;
  // Gloo's own threads bring messages: this only judges whether there are enough to see their ends.
  void progress() override;
  Outcome test(Transfer transfer) override;
  void cancel(Transfer transfer) noexcept override;
  std::optional<Loss> lost() override;
  bool ring_with(std::function<void()> bell) override;
  void close(bool quiet) noexcept override;

 private:
  struct State;
  std::shared_ptr<State> state_;  // each thread holds it too
};

}  // namespace pycollective::shim
