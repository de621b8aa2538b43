#include "engine/far/pair.h"

#include <algorithm>
#include <utility>

#include "engine/copy.h"

namespace pycollective {
namespace {

// MPI counts the bytes of a message in 31 bits.
constexpr std::size_t kLargestPiece = std::size_t{1} << 30;

}  // namespace

FarPair::FarPair(Group& group, const Request& request, std::uint64_t sequence)
    : Operation(group, request, sequence),
      mine_{sequence, called(request)},
      bytes_(request.count * size_of(request.dtype)) {}

FarPair::~FarPair() {
  Messenger& messenger = *group_.messenger();
  if (expecting_) messenger.forget_call(request_.root);
  if (call_) messenger.put_back(std::move(call_));
  if (!data_.empty()) messenger.give_up(std::move(data_), group_.keep(request_));
}

void FarPair::start() {
  Messenger& messenger = *group_.messenger();
  // Each direction of each pair has lanes of its own, so that both may be under way at once.
  messenger.expect_call(request_.root, sends() ? kLanePairAnswer : kLanePairCall);
  expecting_ = true;
  const std::size_t with_it = sends() && bytes_ <= kRiderBytes ? bytes_ : 0;
  Parcel call = messenger.make_call(mine_, with_it);
  copy_bytes(Messenger::data_of(call), request_.input, with_it);
  messenger.send_call(request_.root, sends() ? kLanePairCall : kLanePairAnswer, std::move(call));
}

bool FarPair::hear() {
  if (!expecting_) return true;
  call_ = group_.messenger()->take_call(request_.root, sends() ? kLanePairAnswer : kLanePairCall,
                                        false);
  if (!call_) return false;
  expecting_ = false;
  const CallNote theirs = Messenger::note_of(call_);
  if (agree_as_pair(theirs.called, mine_.called)) return true;
  throw_pair_mismatch({group_.world().rank, request_.kind, sequence_, mine_.describe(),
                       "rank " + std::to_string(request_.root), theirs.describe()},
                      "from one to the other; no data moved");
}

void FarPair::begin_to_move() {
  moving_ = true;
  Messenger& messenger = *group_.messenger();
  if (bytes_ > kRiderBytes) {
    for (std::size_t at = 0; at < bytes_; at += kLargestPiece) {
      const std::size_t piece = std::min(kLargestPiece, bytes_ - at);
      data_.push_back(
          sends() ? messenger.send(request_.root, kLanePair,
                                   static_cast<const std::byte*>(request_.input) + at, piece, piece)
                  : messenger.receive(request_.root, kLanePair,
                                      static_cast<std::byte*>(request_.output) + at, piece));
    }
  } else if (!sends()) {
    if (Messenger::data_bytes_of(call_) != bytes_)
      throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                               "rank " + std::to_string(request_.root) +
                                   " sent its call without the data that go with it"});
    copy_bytes(request_.output, Messenger::data_of(call_), bytes_);
  }
}

State FarPair::advance() {
  group_.messenger()->poll();
  if (!hear()) return State::kBlocked;
  if (!moving_) begin_to_move();
  bool all = true;
  for (Ticket& each : data_) all = group_.messenger()->done(each) && all;
  return all ? State::kDone : State::kBlocked;
}

std::string FarPair::far_absentees() const {
  return expecting_ ? std::to_string(request_.root) : std::string();
}

}  // namespace pycollective
