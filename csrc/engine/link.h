// Moves bytes to and from ranks that share no memory with this one: over MPI, say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/api.h"

namespace pycollective {

// Thread-safe. Messages from one rank to another with one tag arrive in the order of the calls.
// What cannot be done throws CollectiveFailure.
class Link {
 public:
  using Ticket = std::uint64_t;
  // A failure that a rank of another host tells.
  struct Notice {
    FailureKind kind = FailureKind::kNone;
    int reporter = 0;
    std::string report;
  };

  virtual ~Link() = default;
  // The memory is the link's until the ticket is done.
  virtual Ticket isend(int rank, int tag, const void* data, std::size_t bytes) = 0;
  virtual Ticket irecv(int rank, int tag, void* data, std::size_t bytes) = 0;
  // Lets what was started go on: to be called while anything is awaited.
  virtual void poll() = 0;
  virtual bool done(Ticket ticket) = 0;
  // Gives up what is not done, of an operation that failed: its memory is the caller's again.
  virtual void give_up(const std::vector<Ticket>& tickets) noexcept = 0;
  // Tells every rank of other hosts. Does not wait, and does not throw.
  virtual void tell(const Notice& notice) noexcept = 0;
  // The first that came, as far as polled; nullptr while there is none.
  virtual std::shared_ptr<const Notice> notice() = 0;
  // Whether news rings this process's doorbell, so that who sleeps need not look.
  virtual bool rings() const { return false; }
  // Lets go of the ranks of other hosts. Idempotent.
  virtual void close() noexcept = 0;
};

// Rings a process's doorbell, as it travels in a capsule to a link that another library makes.
using Bell = std::function<void()>;
constexpr const char* kBellName = "pycollective.Bell.v1";

// Tags of the messages of a communicator.
constexpr int kTagNotice = 1;
constexpr int kTagCall = 2;        // what a rank has called
constexpr int kTagPairCall = 3;    // who sends to one rank, to that rank
constexpr int kTagPairAnswer = 4;  // who receives, to the sender
constexpr int kTagPair = 5;
constexpr int kTagFirst = 16;  // of collectives

// A communicator's ranks, where the group that shares memory is some of them.
struct World {
  int rank = 0;
  int size = 1;
  std::vector<int> near;       // the rank of each member of the group
  std::shared_ptr<Link> link;  // to the others; none where there are none
  int beside = 1;              // ranks on this machine, where it plays several hosts
};

}  // namespace pycollective
