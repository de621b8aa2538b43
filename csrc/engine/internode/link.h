// What a transport between hosts has to offer: it starts messages, and tells how they end. All else
// (what is sent to whom, failures, goodbyes, memory) is the messenger's (messenger.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/api.h"

namespace pycollective {

// The lanes of a communicator: messages on one of them keep their order.
constexpr int kLaneControl = 1;     // failures, goodbyes, reminders; received from any rank
constexpr int kLaneCall = 2;        // what a rank has called, and its first data if they are short
constexpr int kLanePairCall = 3;    // the same of who sends to one rank, to that rank
constexpr int kLanePairAnswer = 4;  // of who receives, to the sender
constexpr int kLanePair = 5;        // the first of those of the data between the two
constexpr int kPairLanes = 59;      // one for each message that is under way between the two; the
                                    // last for the library's own
constexpr int kLaneFirst = 64;      // of collectives

// The transport of one communicator. No call waits. The messenger calls it from one thread at a
// time. lost() reports a rank that cannot be reached, and its transfers end as kLost. What this
// rank cannot do for a reason of its own throws std::exception.
class PYCOLLECTIVE_PUBLIC Link {
 public:
  using Transfer = std::uint64_t;  // the number of a message under way, never used again; 0: none
  enum class Outcome : std::uint8_t {
    kUnderWay,  // the link uses the memory
    // With each of the following the link is done with the memory, and forgets the transfer.
    kDone,
    kCancelled,
    kLost,  // lost() reports the other side
  };
  struct Loss {
    int rank;
    std::string how;
  };
  static constexpr int kAnyRank = -1;

  virtual ~Link() = default;

  // Messages from one rank to another on one lane arrive in the order of the calls. A message is at
  // most as long as the receive's capacity; the link need not tell its length. `awaited`: a caller
  // waits for the end of this send; else the link may notice it late.
  virtual Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool awaited) = 0;
  virtual Transfer receive(int rank, int lane, void* data, std::size_t capacity) = 0;
  // Makes progress. To be called while anything is awaited.
  virtual void progress() = 0;
  virtual Outcome test(Transfer transfer) = 0;
  // Asks for a transfer to end; test() tells when it has. A transfer that the transport cannot stop
  // stays under way.
  virtual void cancel(Transfer transfer) noexcept = 0;
  // A rank that cannot be reached any more; each is reported once.
  virtual std::optional<Loss> lost() = 0;

  // Takes a function that wakes this process's threads. Returns whether the link calls it when
  // something has happened, so that a sleeping thread need not poll. It may call it from any thread
  // until close() has returned.
  virtual bool wake_with(std::function<void()> wake) = 0;

  // Whether it may be closed only when nothing can come any more (engine/internode/messenger.h).
  virtual bool must_be_quiet() const { return false; }

  // Closes the transport. Idempotent. What is under way stays so. `quiet`: no operation failed, so
  // nothing is on its way but the library's own messages, which name the communicator. Otherwise
  // messages on their way to this rank must never be taken for another link's.
  virtual void close(bool quiet) noexcept = 0;
};

// A capsule carries a `std::shared_ptr<Link>*` from the library that makes it to the core.
constexpr const char* kLinkCapsule = "pycollective.Link.v1";

}  // namespace pycollective
