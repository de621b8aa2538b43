#include "engine/internode/transfers.h"

#include <algorithm>

namespace pycollective {

FarTransfers::FarTransfers(Group& group, const Request& request, std::uint64_t sequence)
    : group_(group),
      messenger_(*group.messenger()),
      request_(request),
      program_(*request.program),
      call_(group, request, sequence, request.program->far),
      rides_(program_.messages.size(), false),
      receives_(kChunkSlots * program_.messages.size()) {}

FarTransfers::~FarTransfers() {
  std::vector<Ticket> open;
  const auto add = [&](const std::vector<Ticket>& tickets) {
    for (const Ticket& each : tickets)
      if (each.transfer != 0) open.push_back(each);
  };
  add(receives_);
  for (const auto& sends : sends_) add(sends);
  if (!open.empty()) messenger_.give_up(std::move(open), group_.keep(request_));
}

std::array<std::vector<std::int32_t>, 2> FarTransfers::first_messages() const {
  std::array<std::vector<std::int32_t>, 2> firsts;
  for (auto& each : firsts) each.assign(program_.far.size(), -1);
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

void FarTransfers::announce() {
  call_.expect();
  std::vector<bool> with_data(program_.far.size(), false);
  for (const Instruction& each : program_.instructions)
    if (each.kind == Instruction::Kind::kSend && rides_[static_cast<std::size_t>(each.a)])
      with_data[peer_of(each.a)] = true;
  for (std::size_t peer = 0; peer < with_data.size(); ++peer)
    if (!with_data[peer]) call_.send(peer, call_.make(0));
}

void FarTransfers::poll() {
  messenger_.poll();
  if (call_.complete() && put_off_.empty()) return;
  call_.listen();
  const auto posted = [&](const PutOff& each) {
    if (!call_.heard(peer_of(each.message))) return false;
    const Message& what = program_.messages[static_cast<std::size_t>(each.message)];
    receives_[index(each.slot, each.message)] =
        messenger_.receive(what.rank, lane(each.slot, what), each.memory, each.bytes);
    return true;
  };
  if (!put_off_.empty())
    put_off_.erase(std::remove_if(put_off_.begin(), put_off_.end(), posted), put_off_.end());
}

std::set<int> FarTransfers::unfinished() const {
  std::set<int> ranks;
  const auto add_open = [&](const std::vector<Ticket>& tickets) {
    // What has come, and the operation has not looked at yet, is not its rank's to finish.
    for (const Ticket& each : tickets)
      if (!messenger_.has_come(each)) ranks.insert(each.rank);
  };
  add_open(receives_);
  for (const auto& sends : sends_) add_open(sends);
  return ranks;
}

const std::byte* FarTransfers::rider(std::int32_t message, std::size_t bytes) const {
  const std::size_t peer = peer_of(message);
  if (!call_.heard(peer)) return nullptr;
  static constexpr std::byte nothing{};
  if (bytes == 0) return &nothing;
  const std::byte* data = call_.data(peer, bytes);
  if (data == nullptr)
    throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, 0,
                             "rank " + std::to_string(program_.far[peer]) +
                                 " sent its call without the data that go with it"});
  return data;
}

void FarTransfers::post(std::size_t slot, std::int32_t message, void* memory, std::size_t bytes) {
  const Message& what = program_.messages[static_cast<std::size_t>(message)];
  if (!call_.heard(peer_of(message))) return put_off_.push_back({slot, message, memory, bytes});
  receives_[index(slot, message)] = messenger_.receive(what.rank, lane(slot, what), memory, bytes);
}

bool FarTransfers::arrived(std::size_t slot, std::int32_t message) {
  for (const PutOff& each : put_off_)
    if (each.slot == slot && each.message == message) return false;
  return messenger_.done(receives_[index(slot, message)]);
}

void FarTransfers::send(std::size_t slot, std::int32_t message, const void* memory,
                        std::size_t bytes, std::size_t raw_bytes) {
  const Message& what = program_.messages[static_cast<std::size_t>(message)];
  sends_[slot].push_back(messenger_.send(what.rank, lane(slot, what), memory, bytes, raw_bytes));
}

bool FarTransfers::settled(std::size_t slot, std::size_t count) {
  bool all = true;
  for (std::size_t i = 0; i < count; ++i) all = messenger_.done(sends_[slot][i]) && all;
  return all;
}

bool FarTransfers::all_settled(std::size_t slot) {
  if (!settled(slot, sends_[slot].size())) return false;
  sends_[slot].clear();
  return true;
}

}  // namespace pycollective
