// What a rank alone knows of its messages to and from others, whichever threads carry them on.
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
// The two halves, and behind them announcements, for sends that wait for receives of many tags.
constexpr std::size_t kChannelBuffer = 2 * kChannelPart + kPage;
constexpr std::size_t kAnnouncements = 1 + kPage / sizeof(Announcement);
// Of these one for each of the library's own tags (at the places 1, 2...), which have one message
// at a time: no number of users' messages keeps them waiting.
constexpr std::size_t kUserAnnouncements = kAnnouncements - kOwnTags;

// Sends to one peer: they share the announcements and the buffer.
struct Outgoing {
  std::mutex mutex;
  std::uint64_t announced = 0;          // the last number that was given
  std::vector<std::uint64_t> used;      // by place: the announcement that stands there; 0: none
  SendOrder order{kUserAnnouncements};  // of users' messages
  std::uint64_t early = 0;   // whose first chunk lies in the buffer before it is asked for
  std::uint64_t moving = 0;  // which one goes through the buffer
  bool waited_for = false;   // some send has found no place
  // Whether room for its buffer was asked for and granted.
  std::atomic<bool> has_room{false};
};

// Receives from one peer: one message at a time goes through the channel.
struct Incoming {
  std::mutex mutex;
  bool busy = false;
  std::vector<std::uint64_t> taken;  // by place: the last announcement that was granted
  bool waited_for = false;           // some receive has found it busy
};

// What the communicator knows of receives from any rank, and of their order where there are some:
// each receive takes the first message that no earlier one wants.
class RecvOrder {
 public:
  // Whether no receive that was issued before `task` may still take a message of rank `source`.
  virtual bool has_come(const Task& task, int source) const = 0;
  // Whether it is being closed: then those that have taken none end.
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

  void set_recv_order(const RecvOrder* turns) { turns_ = turns; }
  bool may_take(const Task& task, int source) const {
    return task.recv_order == 0 || turns_ == nullptr || turns_->has_come(task, source);
  }
  bool closes() const { return turns_ != nullptr && turns_->closes(); }

 private:
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  PairCalls internode_;
  std::atomic<int> next_source_{0};
  const RecvOrder* turns_ = nullptr;  // set before the first message
};

}  // namespace pycollective
