// What a transport between hosts has to offer: it starts messages, and tells how they end. All else
// (what is sent to whom, failures, goodbyes, whose memory it is) is the messenger's (messenger.h).
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

// One communicator's. No call waits. CallSignature by one thread at a time; the messenger sees to
// that. A rank that cannot be reached is told by lost(), and ends its transfers as kLost. What
// cannot be done for a reason of this rank's own throws std::exception.
class PYCOLLECTIVE_PUBLIC Link {
 public:
  using Transfer = std::uint64_t;  // a message under way, by a number that is not
                                   // given to a later one; 0 is none
  enum class Outcome : std::uint8_t {
    kUnderWay,  // the memory is the link's
    kDone,      // in all else it is the caller's again, for good, and the transfer is forgotten
    kCancelled,
    kLost,  // and lost() tells of the other side
  };
  struct Loss {
    int rank;
    std::string how;
  };
  static constexpr int kAnyRank = -1;

  virtual ~Link() = default;

  // Messages from one rank to another on one lane arrive in the order of the calls. A message may
  // be shorter than the receive's capacity, and is never longer; the link need not tell how long it
  // is. `awaited`: somebody waits for the end of this send; else the link may be late to notice it.
  virtual Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool awaited) = 0;
  virtual Transfer receive(int rank, int lane, void* data, std::size_t capacity) = 0;
  // Lets what was started go on: to be called while anything is awaited.
  virtual void progress() = 0;
  virtual Outcome test(Transfer transfer) = 0;
  // Asks for the end of what nobody wants any more; test() tells when it has ended. What the
  // transport cannot stop stays under way.
  virtual void cancel(Transfer transfer) noexcept = 0;
  // A rank that cannot be reached any more; each is told once.
  virtual std::optional<Loss> lost() = 0;

  // Whether news rings the bell, so that who sleeps need not look; the bell may be rung from any
  // thread, until close() has returned.
  virtual bool ring_with(std::function<void()> bell) = 0;

  // Whether it may be let go of only when nothing can come any more (lingering.h).
  virtual bool must_be_quiet() const { return false; }

  // Lets go of the transport. Idempotent. What is under way stays so. `quiet`: no operation failed,
  // so nothing is on its way any more but the library's own messages, which name the communicator;
  // else what is on its way to this rank must never be taken for another link's.
  virtual void close(bool quiet) noexcept = 0;
};

// A capsule carries a `std::shared_ptr<Link>*` from the library that makes it to the core.
constexpr const char* kLinkCapsule = "pycollective.Link.v1";

}  // namespace pycollective
