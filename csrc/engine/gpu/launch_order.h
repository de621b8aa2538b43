// The order in which a process launches calls on its GPUs' streams: the order of the calls,
// whatever their communicators, and whichever thread sees first that a call's ranks have arrived. A
// kernel waits for its peers on its stream. So a stream would hang if two ranks launched the same
// two calls in different orders.
//
// A call takes its turn on its stream as it enters its communicator's queue, under that lock. It
// passes the turn on once it is launched, or has ended in any other way.
//
// No call awaits a turn for ever. Turns are numbered as calls enter their queues, so the call with
// the lowest number awaits no turn, and neither does any call before it in its queue. Some thread
// always drives it: the progress thread, which blocks for no call; a thread that waits for it; or,
// without a progress thread, any thread that awaits a turn (Communicator::drive). It ends with its
// own timeout at the latest, as does each call that awaits a turn.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "per_process.h"
#include "types.h"

namespace pycollective {

class Communicator;

// A call that has a turn.
struct CallToLaunch {
  OpKind kind;
  std::uint64_t sequence;
  std::weak_ptr<Communicator> communicator;
};

// The turns of a process. Thread-safe.
class LaunchOrder {
 public:
  // Streams that wait for each other have one handle: null stands for the default stream and for
  // all blocking streams.
  using Stream = std::pair<int, const void*>;  // a GPU's number, a handle

  // The GPU's context is current. Throws cuda::DriverError.
  static Stream stream_of(int device, void* handle);

  // The communicators of calls that have turns.
  std::vector<std::shared_ptr<Communicator>> communicators() const;

 private:
  friend class LaunchTurn;

  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<Stream, std::map<std::uint64_t, CallToLaunch>> turns_;
};

// One call's turn; the destructor passes it on. Thread-safe once it is taken.
class LaunchTurn {
 public:
  explicit LaunchTurn(LaunchOrder::Stream stream) : stream_(std::move(stream)) {}
  ~LaunchTurn() { pass(); }
  LaunchTurn(const LaunchTurn&) = delete;
  LaunchTurn& operator=(const LaunchTurn&) = delete;

  // Once, in the order of the calls.
  void take(std::shared_ptr<LaunchOrder> order, CallToLaunch call);
  // The call that is launched next on the stream; null: it is this one.
  std::optional<CallToLaunch> before() const;
  // Passes it on. `launch`: the launch's number in its group; 0: there was none. Returns whether
  // another call awaits its turn on this stream. Idempotent.
  bool pass(std::uint64_t launch = 0);
  // The launch's number; 0: there was none.
  std::uint64_t launch() const;

 private:
  const LaunchOrder::Stream stream_;
  std::shared_ptr<LaunchOrder> order_;
  std::uint64_t number_ = 0;  // under the order's lock, as the next; 0: none
  std::uint64_t launch_ = 0;
  const ForkGuard guard_;
};

}  // namespace pycollective
