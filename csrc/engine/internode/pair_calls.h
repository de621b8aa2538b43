// What ranks of other hosts have called to exchange messages with this one, by rank and tag, until
// the send or the receive comes that it is meant for.
//
// A send calls on kLanePairCall, a receive on kLanePairAnswer. Of one pair and tag calls and
// answers follow each other in the order of the messages, and each side has one at most that the
// other has not heard: so neither needs a number.
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

// Where the data of a message go that are too long to go with the call.
struct DataLane {
  int index = 0;      // of kPairLanes
  unsigned turn = 0;  // how many messages of this pair went there before, in 16 bits
};

// Thread-safe.
class PairCalls {
 public:
  // None where there are no ranks of other hosts.
  explicit PairCalls(Messenger* messenger);

  struct Lane {
    bool used = false;
    unsigned begun = 0;
    unsigned posted = 0;
  };
  struct Tag {
    int wanted = 0;  // by how many operations
    std::deque<MessageBuffer> come;
    int heard() const { return std::min(wanted, static_cast<int>(come.size())); }
  };
  struct Peer {  // what lies in it is for this class
    int rank = 0;
    struct {
      int expected = 0;  // by how many operations, of all tags
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

  // Calls a rank, and awaits its call of that tag on the other lane, until it is taken or
  // forgotten. A receive wants the next that comes, or has come, from then on; `expects`: it does
  // already.
  void call(Peer& peer, int lane, int tag, MessageBuffer call, bool expects);
  void forget(Peer& peer, int lane, int tag);
  // Nothing while none has come. `kept`: set where others' have come instead, and been kept: then
  // more may have come behind these.
  MessageBuffer take(Peer& peer, int lane, int tag, bool& kept);

  // For receives from any rank, which hear all ranks from the first on.
  void hear_anyone(const std::vector<int>& ranks);
  // Where a call has come that no other receive wants it is expected.
  bool expect_if_there(int rank, int tag, bool& kept);

  // Of users' sends that need a lane: to be told of each call.
  SendOrder& order(int rank) { return at(rank).order; }
  // Of the sender, from the call until the data have left; none while all are in use, or what is
  // free is for others. The last is for the library's own tags, so that no number of users'
  // messages keeps these waiting.
  std::optional<DataLane> begin_data(Peer& peer, int tag, std::uint64_t number);
  // Whether some send has found none.
  bool end_data(Peer& peer, int tag, std::uint64_t number, const DataLane& lane);
  // Of the receiver: does `post` if all that go there before have been posted.
  template <class Post>
  bool post_data(Peer& peer, const DataLane& lane, const Post& post) {
    const std::lock_guard lock(mutex_);
    unsigned& turn = peer.lanes[static_cast<std::size_t>(lane.index)].posted;
    if (turn != lane.turn) {
      waits_for_lane_ = true;
      return false;
    }
    post();
    turn = (turn + 1) & 0xffff;
    return true;
  }
  // Whether a receive has found that others have to post theirs first, since the last time.
  bool take_waits_for_lane() {
    const std::lock_guard lock(mutex_);
    return std::exchange(waits_for_lane_, false);
  }

 private:
  Peer& make(int rank);
  static std::size_t side_of(int lane) { return lane == kLanePairAnswer ? 1 : 0; }
  // All with the lock.
  // Does `act` with what is known of a tag, and tells the messenger how many calls are kept for
  // operations.
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

// The lane of a call's data, as the note holds it.
DataLane data_lane_of(const NumberedCall& note);
void set_data_lane(NumberedCall& note, const DataLane& lane);

}  // namespace pycollective
