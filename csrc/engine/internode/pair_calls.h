// Calls of sends and receives of other hosts, kept by rank and tag until the operation comes that
// they are for.
//
// A send calls on kLanePairCall, a receive on kLanePairAnswer. For one pair and tag, calls and
// answers follow the order of the messages, and each side has at most one that the other has not
// heard. So they need no number.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/internode/messenger.h"
#include "engine/operations/send_order.h"

namespace pycollective {

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

}  // namespace pycollective
