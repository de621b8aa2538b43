// The start of a collective between hosts: each rank learns what those have called with whom it
// will exchange messages. The ranks of its own host meet in shared memory (rendezvous.h).
#pragma once

#include <string>
#include <vector>

#include "engine/operation.h"
#include "transport/layout.h"

namespace pycollective {

// What a rank called, as it travels.
struct CallNote {
  std::uint64_t sequence = 0;
  std::uint64_t signature = 0;
  std::uint64_t count = 0;
  std::uint64_t counts_hash = 0;
  char algorithm[sizeof(Arrival::algorithm)] = {};

  CallNote() = default;
  CallNote(const Request& request, std::uint64_t number);
  bool agrees(const CallNote& other) const;
  std::string describe() const;
};

class FarRendezvous {
 public:
  // `peers`: ranks of other hosts.
  FarRendezvous(Group& group, const Request& request, std::uint64_t sequence,
                const std::vector<std::int32_t>& peers);
  ~FarRendezvous();
  FarRendezvous(const FarRendezvous&) = delete;
  FarRendezvous& operator=(const FarRendezvous&) = delete;

  void arrive();
  // Whether all have called. Throws CollectiveFailure (kMismatch) at the first that differs.
  bool complete();
  // Those that have not: "2, 3".
  std::string absentees() const;

 private:
  Group& group_;
  const Request& request_;
  const std::vector<std::int32_t>& peers_;
  CallNote mine_;
  std::vector<CallNote> theirs_;
  std::vector<Link::Ticket> receives_;  // 0: done
  std::vector<Link::Ticket> sends_;
};

}  // namespace pycollective
