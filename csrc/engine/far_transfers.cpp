#include "engine/far_transfers.h"

namespace pycollective {

FarTransfers::~FarTransfers() {
  std::vector<Link::Ticket> open;
  for (const Link::Ticket ticket : receives_)
    if (ticket != 0) open.push_back(ticket);
  for (const auto& sends : sends_)
    for (const Link::Ticket ticket : sends)
      if (ticket != 0) open.push_back(ticket);
  if (!open.empty()) group_.link()->give_up(open);
}

void FarTransfers::post(std::size_t slot, std::int32_t message, void* memory, std::size_t bytes) {
  const Message& what = program_.messages[static_cast<std::size_t>(message)];
  receives_[index(slot, message)] = group_.link()->irecv(what.rank, tag(slot, what), memory, bytes);
}

bool FarTransfers::arrived(std::size_t slot, std::int32_t message) {
  Link::Ticket& ticket = receives_[index(slot, message)];
  if (ticket != 0 && group_.link()->done(ticket)) ticket = 0;
  return ticket == 0;
}

void FarTransfers::send(std::size_t slot, std::int32_t message, const void* memory,
                        std::size_t bytes) {
  const Message& what = program_.messages[static_cast<std::size_t>(message)];
  sends_[slot].push_back(group_.link()->isend(what.rank, tag(slot, what), memory, bytes));
}

bool FarTransfers::settled(std::size_t slot, std::size_t count) {
  bool all = true;
  for (std::size_t i = 0; i < count; ++i) {
    Link::Ticket& ticket = sends_[slot][i];
    if (ticket != 0 && group_.link()->done(ticket)) ticket = 0;
    all = all && ticket == 0;
  }
  return all;
}

bool FarTransfers::all_settled(std::size_t slot) {
  if (!settled(slot, sends_[slot].size())) return false;
  sends_[slot].clear();
  return true;
}

}  // namespace pycollective
