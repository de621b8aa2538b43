// The start of a collective between hosts: every two ranks that will exchange messages tell each
// other, once each way, what they have called. Data of the first message that goes that way travel
// with it if they are short; else it goes ahead of them, and what comes from the other side is
// received only once the calls have been compared: so no output is touched before they agree. The
// ranks of one host meet in shared memory (rendezvous.h).
#pragma once

#include <string>
#include <vector>

#include "engine/internode/messenger.h"
#include "engine/operations/operation.h"

namespace pycollective {

class FarCall {
 public:
  // `peers`: ranks of other hosts, ascending.
  FarCall(Group& group, const Request& request, std::uint64_t sequence,
          const std::vector<std::int32_t>& peers);
  ~FarCall();
  FarCall(const FarCall&) = delete;
  FarCall& operator=(const FarCall&) = delete;

  std::size_t find(std::int32_t rank) const;  // among the peers
  void expect();
  // To peer number `peer`, with room for data, to be sent by send().
  Parcel make(std::size_t data_bytes);
  void send(std::size_t peer, Parcel call);
  // Looks for calls that have come. Throws CollectiveFailure (kMismatch) at the first that differs.
  void listen();
  bool heard(std::size_t peer) const { return heard_[peer]; }
  bool complete() const { return awaited_ == 0; }
  // The data that came with a call that was heard; null where there are none of this length.
  const std::byte* data(std::size_t peer, std::size_t bytes) const;
  // For who has waited long: tells those that it awaits, and hears them.
  void compare() const;
  // Those that have not called: "2, 3".
  std::string absentees() const;

 private:
  [[noreturn]] void throw_mismatch(int rank, const CallNote& theirs) const;

  Group& group_;
  const Request& request_;
  const std::vector<std::int32_t>& peers_;
  const CallNote mine_;
  std::vector<Parcel> calls_;  // of those that brought data
  std::vector<bool> heard_;
  std::size_t awaited_ = 0;
  mutable bool reminded_ = false;
};

}  // namespace pycollective
