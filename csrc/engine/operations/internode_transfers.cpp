#include "engine/operations/internode_transfers.h"

#include <algorithm>

namespace pycollective {

InternodeTransfers::InternodeTransfers(Group& group, const Task& task, std::uint64_t sequence)
    : group_(group),
      messenger_(*group.messenger()),
      request_(*task.request),
      program_(*task.program),
      mine_{sequence, signature_of(task)},
      calls_(peers().size()),
      heard_(peers().size(), false),
      eager_(program_.messages.size(), false),
      receives_(kChunkSlots * program_.messages.size()) {}

InternodeTransfers::~InternodeTransfers() {
  std::vector<MessageHandle> open;
  const auto add = [&](const std::vector<MessageHandle>& handles) {
    for (const MessageHandle& each : handles)
      if (each.transfer != 0) open.push_back(each);
  };
  add(receives_);
  for (const auto& sends : sends_) add(sends);
  if (!open.empty()) messenger_.give_up(std::move(open), group_.keep(request_));
  for (MessageBuffer& call : calls_)
    if (call) messenger_.put_back(std::move(call));
  if (awaited_ == 0) return;
  for (std::size_t i = 0; i < peers().size(); ++i)
    if (!heard_[i]) messenger_.forget_call(peers()[i]);
}

std::size_t InternodeTransfers::peer_of(std::int32_t message) const {
  const std::int32_t rank = program_.messages[static_cast<std::size_t>(message)].rank;
  return static_cast<std::size_t>(std::lower_bound(peers().begin(), peers().end(), rank) -
                                  peers().begin());
}

std::array<std::vector<std::int32_t>, 2> InternodeTransfers::first_messages() const {
  std::array<std::vector<std::int32_t>, 2> firsts;
  for (auto& each : firsts) each.assign(peers().size(), -1);
  const auto step_of = [&](std::int32_t message) {
    return program_.messages[static_cast<std::size_t>(message)].step;
  };
  for (const Instruction& each : program_.instructions) {
    const bool receives = each.kind == Instruction::Kind::kReceive;
    if (!receives && each.kind != Instruction::Kind::kSend) continue;
    std::int32_t& first = firsts[receives ? 1 : 0][peer_of(each.a)];
    // Both sides number the steps alike.
    if (first < 0 || step_of(each.a) < step_of(first)) first = each.a;
  }
  return firsts;
}

// Calls all peers but those whose call takes an eager payload: that goes as it is sent.
void InternodeTransfers::announce() {
  expect_calls();
  std::vector<bool> with_data(peers().size(), false);
  for (const Instruction& each : program_.instructions)
    if (each.kind == Instruction::Kind::kSend && eager_[static_cast<std::size_t>(each.a)])
      with_data[peer_of(each.a)] = true;
  for (std::size_t peer = 0; peer < with_data.size(); ++peer)
    if (!with_data[peer]) send_call_to(peer, make_call(0));
}

void InternodeTransfers::expect_calls() {
  heard_.assign(peers().size(), true);  // for the destructor, should one of these throw
  for (std::size_t i = 0; i < peers().size(); ++i) {
    messenger_.expect_call(peers()[i], kLaneCall);
    heard_[i] = false;
    ++awaited_;
  }
}

void InternodeTransfers::hear_calls() {
  if (awaited_ == 0) return;
  for (std::size_t i = 0; i < peers().size(); ++i) {
    if (heard_[i]) continue;
    MessageBuffer call = messenger_.take_call(peers()[i], kLaneCall, true);
    if (!call) continue;
    heard_[i] = true;
    --awaited_;
    const NumberedCall theirs = Messenger::note_of(call);
    if (!theirs.agrees(mine_)) throw_mismatch(peers()[i], theirs);
    if (Messenger::data_bytes_of(call) != 0)
      calls_[i] = std::move(call);
    else
      messenger_.put_back(std::move(call));
  }
}

void InternodeTransfers::poll() {
  messenger_.poll();
  if (awaited_ == 0 && put_off_.empty()) return;
  hear_calls();
  const auto posted = [&](const PutOff& each) {
    if (!heard_[peer_of(each.message)]) return false;
    const Message& what = program_.messages[static_cast<std::size_t>(each.message)];
    receives_[index(each.slot, each.message)] =
        messenger_.receive(what.rank, lane(each.slot, what), each.memory, each.bytes);
    return true;
  };
  if (!put_off_.empty())
    put_off_.erase(std::remove_if(put_off_.begin(), put_off_.end(), posted), put_off_.end());
}

void InternodeTransfers::compare_calls() const {
  // Also of a rank that this one exchanges nothing with: it would in its own call.
  if (const auto other = messenger_.find_other_call(mine_))
    throw_mismatch(other->first, other->second);
  if (reminded_ || awaited_ == 0) return;
  reminded_ = true;
  std::vector<int> silent;
  for (std::size_t i = 0; i < peers().size(); ++i)
    if (!heard_[i]) silent.push_back(peers()[i]);
  messenger_.remind(silent, mine_);
}

void InternodeTransfers::throw_mismatch(int rank, const NumberedCall& theirs) const {
  pycollective::throw_mismatch(
      {group_.world().rank, request_.kind, mine_.sequence, mine_.describe(),
       "rank " + std::to_string(rank), theirs.describe()},
      "of this communicator; no data moved between the two");
}

std::string InternodeTransfers::absentees() const {
  std::string ranks;
  for (std::size_t i = 0; i < peers().size(); ++i)
    if (!heard_[i]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(peers()[i]);
  return ranks;
}

std::set<int> InternodeTransfers::unfinished() const {
  std::set<int> ranks;
  const auto add_open = [&](const std::vector<MessageHandle>& handles) {
    // What has come, and the operation has not looked at yet, is not its rank's to finish.
    for (const MessageHandle& each : handles)
      if (!messenger_.has_come(each)) ranks.insert(each.rank);
  };
  add_open(receives_);
  for (const auto& sends : sends_) add_open(sends);
  return ranks;
}

const std::byte* InternodeTransfers::eager_payload(std::int32_t message, std::size_t bytes) const {
  const std::size_t peer = peer_of(message);
  if (!heard_[peer]) return nullptr;
  static constexpr std::byte nothing{};
  if (bytes == 0) return &nothing;
  const MessageBuffer& call = calls_[peer];
  if (!call || Messenger::data_bytes_of(call) != bytes)
    throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, 0,
                             "rank " + std::to_string(peers()[peer]) +
                                 " sent its call without the data that go with it"});
  return Messenger::data_of(call);
}

void InternodeTransfers::post(std::size_t slot, std::int32_t message, void* memory,
                              std::size_t bytes) {
  const Message& what = program_.messages[static_cast<std::size_t>(message)];
  if (!heard_[peer_of(message)]) return put_off_.push_back({slot, message, memory, bytes});
  receives_[index(slot, message)] = messenger_.receive(what.rank, lane(slot, what), memory, bytes);
}

bool InternodeTransfers::arrived(std::size_t slot, std::int32_t message) {
  for (const PutOff& each : put_off_)
    if (each.slot == slot && each.message == message) return false;
  return messenger_.done(receives_[index(slot, message)]);
}

void InternodeTransfers::send(std::size_t slot, std::int32_t message, const void* memory,
                              std::size_t bytes, std::size_t raw_bytes) {
  const Message& what = program_.messages[static_cast<std::size_t>(message)];
  sends_[slot].push_back(messenger_.send(what.rank, lane(slot, what), memory, bytes, raw_bytes));
}

bool InternodeTransfers::sends_done(std::size_t slot, std::size_t count) {
  bool all = true;
  for (std::size_t i = 0; i < count; ++i) all = messenger_.done(sends_[slot][i]) && all;
  return all;
}

bool InternodeTransfers::all_sends_done(std::size_t slot) {
  if (!sends_done(slot, sends_[slot].size())) return false;
  sends_[slot].clear();
  return true;
}

}  // namespace pycollective
