// A rank's own state of its messages to and from others, shared by the threads that drive them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/api.h"
#include "engine/internode/messenger.h"
#include "engine/task.h"
#include "shared_memory/layout.h"

namespace pycollective {

// Which sends to one peer may begin, if more wait than there are places.
//
// Messages with one tag follow each other. For each tag, the oldest send without a place competes
// for one, even while an earlier send of the tag that needs no place is under way. The oldest of
// the competing sends get the free places. So as long as the peer leaves messages of fewer tags
// unreceived than there are places, it can receive any other message. If places went to whichever
// send looks first, later sends could hold them all, and a receive that comes before theirs would
// wait for ever. (The price: a place stays free while its send waits for an earlier one of its
// tag.)
//
// A call costs the logarithm of the number of waiting sends. A waiting send looks at no more
// entries than there are places. Sends one after another allocate nothing.
//
// It holds the sends that need a place, from call to end, by tag and number; numbers grow with the
// calls. Thread-safe, with a lock of its own: call() runs under the communicator's lock, and must
// not wait for data to be copied or sent.
class SendOrder {
 public:
  explicit SendOrder(std::size_t places) : free_(places) {}

  // Adds a send. In the order of the calls.
  void call(int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto at = sends_.put({tag, number});
    if (at == sends_.all.begin() || std::prev(at)->first != tag) lacking_.put(number);
  }
  // For the oldest send of its tag. False while the free places belong to older sends.
  bool take_place(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    std::size_t left = free_;
    const auto& lacking = lacking_.all;
    for (auto each = lacking.begin(); left > 0 && each != lacking.end() && *each < number; ++each)
      --left;
    if (left == 0) return false;
    lacking_.take(lacking.find(number));
    --free_;
    return true;
  }
  // Frees the place of a send. The next one of its tag competes from then on.
  void end(int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    ++free_;
    const auto next = sends_.take(sends_.all.find({tag, number}));
    if (next != sends_.all.end() && next->first == tag) lacking_.put(next->second);
  }

 private:
  // A set that reuses the memory of the element taken last for the next one put.
  template <class Value>
  struct Kept {
    using Set = std::set<Value>;
    typename Set::iterator put(const Value& value) {
      if (spare.empty()) return all.insert(value).first;
      spare.value() = value;
      return all.insert(std::move(spare)).position;
    }
    // Removes the element at `at`, if any. Returns the one behind it.
    typename Set::iterator take(typename Set::const_iterator at) {
      if (at == all.end()) return all.end();
      const auto next = std::next(at);
      spare = all.extract(at);
      return all.erase(next, next);
    }
    Set all;
    typename Set::node_type spare;
  };

  std::mutex mutex_;
  std::size_t free_;
  Kept<std::pair<int, std::uint64_t>> sends_;  // that have not ended
  Kept<std::uint64_t> lacking_;                // for each tag, the oldest send without a place
};

// Calls of sends and receives of other hosts, kept by rank and tag until the operation comes that
// they are for.
//
// A send calls on kLanePairCall, a receive on kLanePairAnswer. For one pair and tag, calls and
// answers follow the order of the messages, and each side has at most one that the other has not
// heard. So they need no number.
// The lane for the data of a message that is too long to go with its call.
struct DataLane {
  int index = 0;          // below kPairLanes
  unsigned sequence = 0;  // how many messages of this pair went there before, in 16 bits
};

// Thread-safe.
class PairCalls {
 public:
  // Null if there are no ranks of other hosts.
  explicit PairCalls(Messenger* messenger);

  struct Lane {
    bool used = false;
    unsigned begun = 0;
    unsigned posted = 0;
  };
  struct Tag {
    int wanted = 0;  // operations that await a call
    std::deque<MessageBuffer> come;
    int heard() const { return std::min(wanted, static_cast<int>(come.size())); }
  };
  struct Peer {  // for this class alone
    int rank = 0;
    struct {
      int expected = 0;  // operations that await a call, of all tags
      std::map<int, Tag> tags;
    } side[2];  // calls, answers
    std::array<Lane, kPairLanes> lanes;
    bool waits_for_lane = false;
    SendOrder order{kPairLanes - 1};  // the last is for the library's own tags
  };
  Peer& at(int rank) {
    Peer* const known = known_[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
    return known != nullptr ? *known : make(rank);
  }

  // Calls a rank, and awaits its call with that tag on the other lane until take() or forget().
  // `expects`: the call is awaited already (expect_if_there).
  void call(Peer& peer, int lane, int tag, MessageBuffer call, bool expects);
  void forget(Peer& peer, int lane, int tag);
  // Empty while none has come. Sets `kept` if calls for other operations came instead and were
  // kept: more may have come behind these.
  MessageBuffer take(Peer& peer, int lane, int tag, bool& kept);

  // For receives from any rank: from the first one on, calls of all ranks are received.
  void hear_anyone(const std::vector<int>& ranks);
  // If a call has come that no other receive wants, expects it and returns true.
  bool expect_if_there(int rank, int tag, bool& kept);

  // The order of users' sends that need a lane. Each such call is announced to it.
  SendOrder& order(int rank) { return at(rank).order; }
  // Gives a send a lane from its call until its data have left. Null while all lanes are in use, or
  // the free ones belong to earlier sends. The last lane is for the library's own tags, so users'
  // messages cannot block them.
  std::optional<DataLane> begin_data(Peer& peer, int tag, std::uint64_t number);
  // Returns whether a send waits for a lane.
  bool end_data(Peer& peer, int tag, std::uint64_t number, const DataLane& lane);
  // For a receive: calls `post` once all earlier receives on the lane have been posted.
  template <class Post>
  bool post_data(Peer& peer, const DataLane& lane, const Post& post) {
    const std::lock_guard lock(mutex_);
    unsigned& posted = peer.lanes[static_cast<std::size_t>(lane.index)].posted;
    if (posted != lane.sequence) {
      waits_for_lane_ = true;
      return false;
    }
    post();
    posted = (posted + 1) & 0xffff;
    return true;
  }
  // Whether post_data() has returned false since the last call.
  bool take_waits_for_lane() {
    const std::lock_guard lock(mutex_);
    return std::exchange(waits_for_lane_, false);
  }

 private:
  Peer& make(int rank);
  static std::size_t side_of(int lane) { return lane == kLanePairAnswer ? 1 : 0; }
  // All with the lock.
  // Calls `act` with the state of a tag, and tells the messenger how many awaited calls have come.
  template <class Act>
  void change(Peer& peer, int lane, int tag, const Act& act);
  void want(Peer& peer, int lane, int tag);
  void drop(Peer& peer, int lane, int tag);
  void keep(Peer& peer, int lane, MessageBuffer call);

  Messenger* const messenger_;
  std::mutex mutex_;
  std::mutex making_;  // never held while anything is sent
  std::deque<Peer> peers_;
  std::vector<std::atomic<Peer*>> known_;  // by rank
  bool hears_anyone_ = false;
  bool waits_for_lane_ = false;
};

// The data lane that a call names.
DataLane data_lane_of(const NumberedCall& note);
void set_data_lane(NumberedCall& note, const DataLane& lane);

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
  std::byte* buffer = nullptr;
  // Whether the memory check has passed for the buffer.
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
  virtual bool is_turn_of(const Task& task, int source) const = 0;
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
    return task.recv_order == 0 || order_ == nullptr || order_->is_turn_of(task, source);
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
