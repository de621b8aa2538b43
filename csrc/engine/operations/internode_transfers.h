// The messages of a scheduled operation between this rank and ranks of other hosts.
//
// Every two ranks that exchange messages tell each other, once each way, what they have called. A
// receive is posted only once the sender's call was heard and agrees, so no output is touched
// before that. The first message of the first chunk goes with the sender's call where it is short:
// it is eager. Else the call goes ahead of it.
//
// Messages are counted by the slot of the chunk that they belong to. (The ranks of one host compare
// their calls in shared memory: arrival.h.)
#pragma once

#include <array>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/group.h"
#include "engine/internode/messenger.h"
#include "engine/plans/program.h"

namespace pycollective {

class InternodeTransfers {
 public:
  InternodeTransfers(Group& group, const Task& task, std::uint64_t sequence);
  ~InternodeTransfers();
  InternodeTransfers(const InternodeTransfers&) = delete;
  InternodeTransfers& operator=(const InternodeTransfers&) = delete;

  // Tells the peers what is called. `first_bytes(message)`: of the message in the first chunk;
  // `chunks`: whether there are any.
  template <class Bytes>
  void start(bool chunks, const Bytes& first_bytes) {
    if (chunks) choose_eager(first_bytes);
    announce();
  }
  // Makes progress. Throws CollectiveFailure (kMismatch) at the first call that differs.
  void poll();
  // Whether every peer has called the same.
  bool all_have_called() const { return awaited_ == 0; }
  // For who has waited long: tells the awaited ranks what it has called, and looks for what they
  // have. Throws CollectiveFailure (kMismatch).
  void compare_calls() const;
  // The ranks that have not called: "2, 3".
  std::string absentees() const;
  // The ranks whose messages have not all come, or have not taken all of this one's.
  std::set<int> unfinished() const;

  // Whether a message goes, or comes, with the call; `first`: it is the first chunk's.
  bool is_eager(bool first, std::int32_t message) const {
    return first && eager_[static_cast<std::size_t>(message)];
  }
  MessageBuffer make_call(std::size_t data_bytes) {
    return messenger_.make_call(mine_, data_bytes);
  }
  void send_call(std::int32_t message, MessageBuffer call) {
    send_call_to(peer_of(message), std::move(call));
  }
  // What came with the call; null while that has not come.
  const std::byte* eager_payload(std::int32_t message, std::size_t bytes) const;

  void post(std::size_t slot, std::int32_t message, void* memory, std::size_t bytes);
  bool arrived(std::size_t slot, std::int32_t message);
  // `raw_bytes`: what is packed in it.
  void send(std::size_t slot, std::int32_t message, const void* memory, std::size_t bytes,
            std::size_t raw_bytes);
  // Counts among a slot's sends one that has left its memory already.
  void count_sent(std::size_t slot) { sends_[slot].push_back({}); }
  // Whether the first `count` messages that were sent in a slot have left their memory.
  bool sends_done(std::size_t slot, std::size_t count);
  // The same for all; the next chunk's are then counted from the first again.
  bool all_sends_done(std::size_t slot);
  // Memory for a message of several pieces.
  std::byte* staging(std::size_t slot, std::int32_t message, std::size_t bytes) {
    return messenger_.staging(index(slot, message), bytes);
  }

 private:
  // A receive that waits for the sender's call.
  struct PutOff {
    std::size_t slot;
    std::int32_t message;
    void* memory;
    std::size_t bytes;
  };

  std::size_t index(std::size_t slot, std::int32_t message) const {
    return slot * program_.messages.size() + static_cast<std::size_t>(message);
  }
  // Among peers().
  std::size_t peer_of(std::int32_t message) const;
  const std::vector<std::int32_t>& peers() const { return program_.peers; }
  // The chunks of a slot follow each other, so one lane a slot and step is enough.
  int lane(std::size_t slot, const Message& message) const {
    return kLaneFirst + static_cast<int>(slot) * program_.steps + message.step;
  }
  // By direction and peer: the first message that goes that way; -1 for none.
  std::array<std::vector<std::int32_t>, 2> first_messages() const;
  template <class Bytes>
  void choose_eager(const Bytes& first_bytes) {
    for (const auto& firsts : first_messages())
      for (const std::int32_t message : firsts)
        if (message >= 0 && first_bytes(message) <= kEagerBytes)
          eager_[static_cast<std::size_t>(message)] = true;
  }
  void announce();
  void expect_calls();
  void send_call_to(std::size_t peer, MessageBuffer call) {
    messenger_.send_call(peers()[peer], kLaneCall, std::move(call));
  }
  void hear_calls();
  [[noreturn]] void throw_mismatch(int rank, const NumberedCall& theirs) const;

  Group& group_;
  Messenger& messenger_;
  const Request& request_;
  const Program& program_;
  const NumberedCall mine_;
  std::vector<MessageBuffer> calls_;  // by peer: those that brought data
  std::vector<bool> heard_;           // by peer
  std::size_t awaited_ = 0;           // peers whose call was not heard
  mutable bool reminded_ = false;
  std::vector<bool> eager_;              // by message
  std::vector<MessageHandle> receives_;  // by slot and message
  std::vector<PutOff> put_off_;
  std::array<std::vector<MessageHandle>, kChunkSlots> sends_;  // by slot, in their order
};

}  // namespace pycollective
