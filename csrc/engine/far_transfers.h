// The messages of a scheduled operation to and from ranks of other hosts, by the slot of the chunk
// that they belong to.
#pragma once

#include <array>
#include <vector>

#include "engine/far_rendezvous.h"
#include "engine/group.h"
#include "engine/program.h"

namespace pycollective {

class FarTransfers {
 public:
  FarTransfers(Group& group, const Request& request, std::uint64_t sequence)
      : group_(group),
        program_(*request.program),
        rendezvous_(group, request, sequence, request.program->far),
        receives_(kChunkSlots * request.program->messages.size(), 0) {}
  ~FarTransfers();
  FarTransfers(const FarTransfers&) = delete;
  FarTransfers& operator=(const FarTransfers&) = delete;

  FarRendezvous& rendezvous() { return rendezvous_; }
  const FarRendezvous& rendezvous() const { return rendezvous_; }

  void post(std::size_t slot, std::int32_t message, void* memory, std::size_t bytes);
  bool arrived(std::size_t slot, std::int32_t message);
  void send(std::size_t slot, std::int32_t message, const void* memory, std::size_t bytes);
  // Whether the first `count` messages that were sent in a slot have left their memory.
  bool settled(std::size_t slot, std::size_t count);
  // The same for all; the next chunk's are then counted from the first again.
  bool all_settled(std::size_t slot);
  // Memory for a message of several pieces.
  std::byte* staging(std::size_t slot, std::int32_t message, std::size_t bytes) {
    return group_.staging(index(slot, message), bytes);
  }

 private:
  std::size_t index(std::size_t slot, std::int32_t message) const {
    return slot * program_.messages.size() + static_cast<std::size_t>(message);
  }
  // The chunks of a slot follow each other, so one tag a slot and step is enough.
  int tag(std::size_t slot, const Message& message) const {
    return kTagFirst + static_cast<int>(slot) * program_.tags + message.tag;
  }

  Group& group_;
  const Program& program_;
  FarRendezvous rendezvous_;
  std::vector<Link::Ticket> receives_;                        // by slot and message; 0: none
  std::array<std::vector<Link::Ticket>, kChunkSlots> sends_;  // 0: done
};

}  // namespace pycollective
