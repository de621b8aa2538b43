// A rank's own state of its messages to and from others, shared by the threads that drive them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "engine/api.h"
#include "engine/internode/pair_calls.h"
#include "engine/operations/send_order.h"
#include "engine/task.h"
#include "shared_memory/member.h"

namespace pycollective {

constexpr std::size_t kChannelPart = std::size_t{32} << 10;
// The two parts of the buffer, and behind them announcements, for sends that wait for receives of
// many tags.
constexpr std::size_t kChannelBuffer = 2 * kChannelPart + kPage;
constexpr std::size_t kAnnouncements = 1 + kPage / sizeof(Announcement);
// The library's own tags have one message at a time, and a place each (1, 2, ...): users' messages
// cannot block them.
constexpr std::size_t kUserAnnouncements = kAnnouncements - kOwnTags;

// Sends to one peer: they share the announcements and the buffer.
struct Outgoing {
  std::mutex mutex;
  std::uint64_t announced = 0;          // the last announcement's number
  std::vector<std::uint64_t> used;      // by place: the announcement there; 0: none
  SendOrder order{kUserAnnouncements};  // of users' messages
  std::uint64_t early = 0;   // the announcement whose first chunks were written before its grant
  std::uint64_t moving = 0;  // the announcement whose message goes through the buffer
  bool waited_for = false;   // a send has found no place
  // Whether the memory check has passed for its buffer.
  std::atomic<bool> has_memory{false};
};

// Receives from one peer: one message at a time goes through the channel.
struct Incoming {
  std::mutex mutex;
  bool busy = false;
  std::vector<std::uint64_t> taken;  // by place: the last announcement granted
  bool waited_for = false;           // a receive has found it busy
};

// The order of receives, if some are from any rank: each receive takes the first message that no
// earlier one may take.
class RecvOrder {
 public:
  // Whether no receive that was issued before `task` may still take a message of rank `source`.
  virtual bool has_come(const Task& task, int source) const = 0;
  // Whether the communicator closes: receives from any rank that have taken no message end.
  virtual bool closes() const = 0;

 protected:
  ~RecvOrder() = default;
};

class Messages {
 public:
  Messages(int members, Messenger* messenger)
      : outgoing_(static_cast<std::size_t>(members)),
        incoming_(static_cast<std::size_t>(members)),
        internode_(messenger) {}

  Outgoing& to(Member peer) { return outgoing_[peer.at()]; }
  Incoming& from(Member peer) { return incoming_[peer.at()]; }
  PairCalls& internode() { return internode_; }

  // Where receives from any rank look first.
  int next_source() const { return next_source_.load(std::memory_order_relaxed); }
  void set_next_source(int rank) { next_source_.store(rank, std::memory_order_relaxed); }

  void set_recv_order(const RecvOrder* order) { order_ = order; }
  bool may_take(const Task& task, int source) const {
    return task.recv_order == 0 || order_ == nullptr || order_->has_come(task, source);
  }
  bool closes() const { return order_ != nullptr && order_->closes(); }

 private:
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  PairCalls internode_;
  std::atomic<int> next_source_{0};
  const RecvOrder* order_ = nullptr;  // set before the first message
};

}  // namespace pycollective
