#include "engine/operations/internode_pair.h"

#include <algorithm>
#include <utility>

#include "engine/shards.h"

namespace pycollective {
namespace {

// MPI counts the bytes of a message in 31 bits.
constexpr std::size_t kLargestPiece = std::size_t{1} << 30;

}  // namespace

InternodePair::InternodePair(Group& group, const Task& task, std::uint64_t sequence, bool expects)
    : Operation(group, task, sequence),
      calls_(group.messages().internode()),
      peer_(calls_.at(request_.root)),
      mine_{sequence, signature_of(task)},
      bytes_(request_.count * size_of(request_.dtype)),
      expecting_(expects) {}

InternodePair::~InternodePair() {
  Messenger& messenger = *group_.messenger();
  if (expecting_) calls_.forget(peer_, theirs(), request_.tag);
  if (call_) messenger.put_back(std::move(call_));
  if (!data_.empty()) messenger.give_up(std::move(data_), group_.keep(request_));
}

bool InternodePair::begin() {
  if (sends()) {
    if (!rides()) {
      lane_ = calls_.begin_data(peer_, request_.tag, sequence_);
      if (!lane_) return false;
      set_data_lane(mine_, *lane_);
    }
  } else if (!expecting_ && !group_.messages().may_take(task_, request_.root)) {
    return false;
  }
  began_ = true;
  Messenger& messenger = *group_.messenger();
  const std::size_t with_it = sends() && rides() ? bytes_ : 0;
  MessageBuffer call = messenger.make_call(mine_, with_it);
  copy_bytes(Messenger::data_of(call), request_.input, with_it);
  // Each direction of each pair has lanes of its own, so that both may be under way at once.
  const bool expects = std::exchange(expecting_, true);
  calls_.call(peer_, sends() ? kLanePairCall : kLanePairAnswer, request_.tag, std::move(call),
              expects);
  return true;
}

bool InternodePair::hear(bool& kept) {
  if (!expecting_) return true;
  call_ = calls_.take(peer_, theirs(), request_.tag, kept);
  if (!call_) return false;
  expecting_ = false;
  const NumberedCall theirs = Messenger::note_of(call_);
  if (agree_as_pair(theirs.called, mine_.called)) {
    if (!sends() && !rides()) lane_ = data_lane_of(theirs);
    return true;
  }
  throw_pair_mismatch(request_,
                      {group_.world().rank, request_.kind, sequence_, mine_.describe(),
                       "rank " + std::to_string(request_.root), theirs.describe()},
                      theirs.called, "from one to the other; no data moved");
}

template <class Act>
void InternodePair::each_piece(const Act& act) {
  for (std::size_t at = 0; at < bytes_; at += kLargestPiece)
    data_.push_back(act(at, std::min(kLargestPiece, bytes_ - at)));
}

bool InternodePair::begin_to_move() {
  Messenger& messenger = *group_.messenger();
  if (!rides()) {
    const int lane = kLanePair + lane_->index;
    if (sends()) {
      each_piece([&](std::size_t at, std::size_t piece) {
        return messenger.send(request_.root, lane,
                              static_cast<const std::byte*>(request_.input) + at, piece, piece);
      });
    } else if (!calls_.post_data(peer_, *lane_, [&] {
                 each_piece([&](std::size_t at, std::size_t piece) {
                   return messenger.receive(request_.root, lane,
                                            static_cast<std::byte*>(request_.output) + at, piece);
                 });
               })) {
      return false;
    } else if (calls_.take_waits_for_lane()) {
      group_.wake_own_threads();
    }
  } else if (!sends()) {
    if (Messenger::data_bytes_of(call_) != bytes_)
      throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                               "rank " + std::to_string(request_.root) +
                                   " sent its call without the data that go with it"});
    copy_bytes(request_.output, Messenger::data_of(call_), bytes_);
  }
  moving_ = true;
  return true;
}

State InternodePair::advance() {
  group_.messenger()->poll();
  if (!began_ && !begin()) return State::kBlocked;
  bool kept = false;
  if (!hear(kept)) return kept ? State::kProgressed : State::kBlocked;
  if (!moving_ && !begin_to_move()) return State::kBlocked;
  bool all = true;
  for (MessageHandle& each : data_) all = group_.messenger()->done(each) && all;
  if (!all) return State::kBlocked;
  if (sends() && lane_ && calls_.end_data(peer_, request_.tag, sequence_, *lane_))
    group_.wake_own_threads();
  return State::kDone;
}

std::string InternodePair::internode_absentees() const {
  return expecting_ || !began_ ? std::to_string(request_.root) : std::string();
}

// Asked only while it is not done.
std::set<int> InternodePair::internode_unfinished() const { return {request_.root}; }

}  // namespace pycollective
