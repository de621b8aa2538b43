#include "engine/internode/call.h"

#include <algorithm>

namespace pycollective {

FarCall::FarCall(Group& group, const Request& request, std::uint64_t sequence,
                 const std::vector<std::int32_t>& peers)
    : group_(group),
      request_(request),
      peers_(peers),
      mine_{sequence, called(request)},
      calls_(peers.size()),
      heard_(peers.size(), false) {}

FarCall::~FarCall() {
  Messenger& messenger = *group_.messenger();
  for (Parcel& call : calls_)
    if (call) messenger.put_back(std::move(call));
  if (awaited_ == 0) return;
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (!heard_[i]) messenger.forget_call(peers_[i]);
}

std::size_t FarCall::find(std::int32_t rank) const {
  return static_cast<std::size_t>(std::lower_bound(peers_.begin(), peers_.end(), rank) -
                                  peers_.begin());
}

void FarCall::expect() {
  heard_.assign(peers_.size(), true);  // for the destructor, should one of these throw
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    group_.messenger()->expect_call(peers_[i], kLaneCall);
    heard_[i] = false;
    ++awaited_;
  }
}

Parcel FarCall::make(std::size_t data_bytes) {
  return group_.messenger()->make_call(mine_, data_bytes);
}

void FarCall::send(std::size_t peer, Parcel call) {
  group_.messenger()->send_call(peers_[peer], kLaneCall, std::move(call));
}

void FarCall::listen() {
  if (awaited_ == 0) return;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (heard_[i]) continue;
    Parcel call = group_.messenger()->take_call(peers_[i], kLaneCall, true);
    if (!call) continue;
    heard_[i] = true;
    --awaited_;
    const CallNote theirs = Messenger::note_of(call);
    if (!theirs.agrees(mine_)) throw_mismatch(peers_[i], theirs);
    if (Messenger::data_bytes_of(call) != 0)
      calls_[i] = std::move(call);
    else
      group_.messenger()->put_back(std::move(call));
  }
}

const std::byte* FarCall::data(std::size_t peer, std::size_t bytes) const {
  const Parcel& call = calls_[peer];
  return call && Messenger::data_bytes_of(call) == bytes ? Messenger::data_of(call) : nullptr;
}

void FarCall::compare() const {
  Messenger& messenger = *group_.messenger();
  // Also of a rank that this one exchanges nothing with: it would in its own call.
  if (const auto other = messenger.find_other_call(mine_))
    throw_mismatch(other->first, other->second);
  if (reminded_ || awaited_ == 0) return;
  reminded_ = true;
  std::vector<int> silent;
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (!heard_[i]) silent.push_back(peers_[i]);
  messenger.remind(silent, mine_);
}

void FarCall::throw_mismatch(int rank, const CallNote& theirs) const {
  pycollective::throw_mismatch(
      {group_.world().rank, request_.kind, mine_.sequence, mine_.describe(),
       "rank " + std::to_string(rank), theirs.describe()},
      "of this communicator; no data moved between the two");
}

std::string FarCall::absentees() const {
  std::string ranks;
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (!heard_[i]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(peers_[i]);
  return ranks;
}

}  // namespace pycollective
