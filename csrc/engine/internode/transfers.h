// The messages of a scheduled operation to and from ranks of other hosts, by the slot of the chunk
// that they belong to.
//
// The first message of the first chunk between two ranks, each way, goes with the sender's call
// where it is short (call.h). A receive that is to be posted before the sender's call has been
// heard is put off until it has.
#pragma once

#include <array>
#include <set>
#include <utility>
#include <vector>

#include "engine/group.h"
#include "engine/internode/call.h"
#include "engine/plans/program.h"

namespace pycollective {

class FarTransfers {
 public:
  FarTransfers(Group& group, const Request& request, std::uint64_t sequence);
  ~FarTransfers();
  FarTransfers(const FarTransfers&) = delete;
  FarTransfers& operator=(const FarTransfers&) = delete;

  // Tells the peers what is called. `first_bytes(message)`: of the message in the first chunk;
  // `chunks`: whether there are any.
  template <class Bytes>
  void start(bool chunks, const Bytes& first_bytes) {
    if (chunks) choose_riders(first_bytes);
    announce();
  }
  // Lets all go on.
  void poll();
  // Whether every peer has called the same.
  bool all_have_called() const { return call_.complete(); }
  const FarCall& call() const { return call_; }
  // The ranks whose messages have not all come, or have not taken all of this one's.
  std::set<int> unfinished() const;

  // Data that go, or come, with a call; `first` says that it is the first chunk.
  bool rides(bool first, std::int32_t message) const {
    return first && rides_[static_cast<std::size_t>(message)];
  }
  Parcel make_rider(std::size_t bytes) { return call_.make(bytes); }
  void send_rider(std::int32_t message, Parcel call) {
    call_.send(peer_of(message), std::move(call));
  }
  // Null while it has not come.
  const std::byte* rider(std::int32_t message, std::size_t bytes) const;

  void post(std::size_t slot, std::int32_t message, void* memory, std::size_t bytes);
  bool arrived(std::size_t slot, std::int32_t message);
  // `raw_bytes`: what is packed in it.
  void send(std::size_t slot, std::int32_t message, const void* memory, std::size_t bytes,
            std::size_t raw_bytes);
  // Counts among a slot's sends one that has left its memory already.
  void count_sent(std::size_t slot) { sends_[slot].push_back({}); }
  // Whether the first `count` messages that were sent in a slot have left their memory.
  bool settled(std::size_t slot, std::size_t count);
  // The same for all; the next chunk's are then counted from the first again.
  bool all_settled(std::size_t slot);
  // Memory for a message of several pieces.
  std::byte* staging(std::size_t slot, std::int32_t message, std::size_t bytes) {
    return messenger_.staging(index(slot, message), bytes);
  }

 private:
  struct PutOff {
    std::size_t slot;
    std::int32_t message;
    void* memory;
    std::size_t bytes;
  };

  std::size_t index(std::size_t slot, std::int32_t message) const {
    return slot * program_.messages.size() + static_cast<std::size_t>(message);
  }
  std::size_t peer_of(std::int32_t message) const {
    return call_.find(program_.messages[static_cast<std::size_t>(message)].rank);
  }
  // The chunks of a slot follow each other, so one lane a slot and step is enough.
  int lane(std::size_t slot, const Message& message) const {
    return kLaneFirst + static_cast<int>(slot) * program_.steps + message.step;
  }
  // By direction and peer: the first message that goes that way; -1 for none.
  std::array<std::vector<std::int32_t>, 2> first_messages() const;
  template <class Bytes>
  void choose_riders(const Bytes& first_bytes) {
    for (const auto& firsts : first_messages())
      for (const std::int32_t message : firsts)
        if (message >= 0 && first_bytes(message) <= kRiderBytes)
          rides_[static_cast<std::size_t>(message)] = true;
  }
  void announce();

  Group& group_;
  Messenger& messenger_;
  const Request& request_;
  const Program& program_;
  FarCall call_;
  std::vector<bool> rides_;       // by message
  std::vector<Ticket> receives_;  // by slot and message
  std::vector<PutOff> put_off_;   // receives
  // By slot, in their order.
  std::array<std::vector<Ticket>, kChunkSlots> sends_;
};

}  // namespace pycollective
