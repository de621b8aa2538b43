// Messages between hosts over a c10d backend that sends and receives (Gloo).
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

#include <memory>
#include <optional>

#include "engine/internode/link.h"

namespace pycollective::shim {

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
  bool ring_with(std::function<void()> bell) override;
  void close(bool quiet) noexcept override;

 private:
  struct State;
  std::shared_ptr<State> state_;  // each thread holds it too
};

}  // namespace pycollective::shim
