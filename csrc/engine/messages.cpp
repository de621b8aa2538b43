#include "engine/messages.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace pycollective {
namespace {

int tag_of_call(const MessageBuffer& call) { return Messenger::note_of(call).called.message.tag; }

}  // namespace

DataLane data_lane_of(const NumberedCall& note) {
  const CallSignature::Message& message = note.called.message;
  // Another rank may have written anything.
  return {message.lane % kPairLanes, message.lane_sequence};
}

void set_data_lane(NumberedCall& note, const DataLane& lane) {
  note.called.message.lane = static_cast<std::uint16_t>(lane.index);
  note.called.message.lane_sequence = static_cast<std::uint16_t>(lane.sequence);
}

PairCalls::PairCalls(Messenger* messenger)
    : messenger_(messenger),
      known_(messenger == nullptr || messenger->ranks().empty()
                 ? 0
                 : static_cast<std::size_t>(messenger->ranks().back()) + 1) {}

PairCalls::Peer& PairCalls::make(int rank) {
  const std::lock_guard lock(making_);
  std::atomic<Peer*>& known = known_[static_cast<std::size_t>(rank)];
  if (Peer* const made = known.load(std::memory_order_relaxed)) return *made;
  Peer& peer = peers_.emplace_back();
  peer.rank = rank;
  known.store(&peer, std::memory_order_release);
  return peer;
}

template <class Act>
void PairCalls::change(Peer& peer, int lane, int tag, const Act& act) {
  auto& tags = peer.side[side_of(lane)].tags;
  const auto found = tags.try_emplace(tag).first;
  Tag& known = found->second;
  const int before = known.heard();
  act(known);
  const int more = known.heard() - before;
  if (more != 0) messenger_->count_heard(peer.rank, more);
  if (known.wanted == 0 && known.come.empty()) tags.erase(found);
}

void PairCalls::want(Peer& peer, int lane, int tag) {
  ++peer.side[side_of(lane)].expected;
  change(peer, lane, tag, [](Tag& known) { ++known.wanted; });
}

// In this order: at no moment must fewer calls seem to have come than have.
void PairCalls::drop(Peer& peer, int lane, int tag) {
  messenger_->forget_call(peer.rank);
  --peer.side[side_of(lane)].expected;
  change(peer, lane, tag, [](Tag& known) { --known.wanted; });
}

void PairCalls::call(Peer& peer, int lane, int tag, MessageBuffer call, bool expects) {
  const int answer = lane == kLanePairCall ? kLanePairAnswer : kLanePairCall;
  const std::lock_guard lock(mutex_);
  if (!expects) want(peer, answer, tag);
  messenger_->send_and_expect_call(peer.rank, lane, std::move(call), answer, !expects);
}

void PairCalls::forget(Peer& peer, int lane, int tag) {
  const std::lock_guard lock(mutex_);
  drop(peer, lane, tag);
}

// Keeps a call that was heard, and so counts as heard already.
void PairCalls::keep(Peer& peer, int lane, MessageBuffer call) {
  const int tag = tag_of_call(call);
  change(peer, lane, tag, [&](Tag& known) { known.come.push_back(std::move(call)); });
  messenger_->count_heard(peer.rank, -1);
}

// One lock for receiving and looking: a thread that finds nothing here and then sleeps is woken by
// what comes later.
MessageBuffer PairCalls::take(Peer& peer, int lane, int tag, bool& kept) {
  const std::lock_guard lock(mutex_);
  auto& side = peer.side[side_of(lane)];
  const auto found = side.tags.find(tag);
  while (found->second.come.empty()) {
    MessageBuffer call = messenger_->hear_call(peer.rank, lane, false, true);
    if (!call) return call;
    const bool others = tag_of_call(call) != tag || side.expected > 1;
    keep(peer, lane, std::move(call));
    kept = true;
    if (others || (hears_anyone_ && lane == kLanePairCall)) messenger_->open_call(peer.rank, lane);
  }
  MessageBuffer call = std::move(found->second.come.front());
  messenger_->forget_call(peer.rank);
  --side.expected;
  change(peer, lane, tag, [](Tag& known) {
    known.come.pop_front();
    --known.wanted;
  });
  return call;
}

void PairCalls::hear_anyone(const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(hears_anyone_, true)) return;
  for (const int rank : ranks) messenger_->open_call(rank, kLanePairCall);
}

bool PairCalls::expect_if_there(int rank, int tag, bool& kept) {
  Peer& peer = at(rank);
  const std::lock_guard lock(mutex_);
  const auto& tags = peer.side[side_of(kLanePairCall)].tags;
  auto found = tags.find(tag);
  if (found != tags.end() && found->second.wanted > 0) return false;
  while (MessageBuffer call = messenger_->hear_call(rank, kLanePairCall, true, false)) {
    keep(peer, kLanePairCall, std::move(call));
    kept = true;
  }
  found = tags.find(tag);
  if (found == tags.end() || found->second.come.empty()) return false;
  want(peer, kLanePairCall, tag);
  messenger_->expect_call(rank, kLanePairCall);
  return true;
}

std::optional<DataLane> PairCalls::begin_data(Peer& peer, int tag, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const std::size_t own = peer.lanes.size() - 1;
  if (tag < 0 ? peer.lanes[own].used : !peer.order.take_place(number)) {
    peer.waits_for_lane = true;
    return std::nullopt;
  }
  std::size_t index = tag < 0 ? own : 0;
  while (peer.lanes[index].used) ++index;
  Lane& lane = peer.lanes[index];
  lane.used = true;
  const unsigned sequence = std::exchange(lane.begun, (lane.begun + 1) & 0xffff);
  return DataLane{static_cast<int>(index), sequence};
}

bool PairCalls::end_data(Peer& peer, int tag, std::uint64_t number, const DataLane& lane) {
  const std::lock_guard lock(mutex_);
  if (tag >= 0) peer.order.end(tag, number);
  peer.lanes[static_cast<std::size_t>(lane.index)].used = false;
  return std::exchange(peer.waits_for_lane, false);
}

}  // namespace pycollective
