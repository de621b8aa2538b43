// A network of links within one process, for tests: it delays messages, lets those of different
// lanes overtake each other, reads what is sent late, refuses to take back receives, and loses
// ranks. What it does follows from its seed and the order of the calls alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "engine/internode/link.h"

namespace pycollective::testing {

struct Manner {
  unsigned seed = 0;
  int longest_delay = 0;    // in calls of progress() by the receiver
  bool reads_late = false;  // a send reads its memory when it is delivered
  bool cancels = true;      // whether what is under way can be taken back
  bool meets = false;       // the library's own messages are sent once there is room for them, and
                            // are gone with their sender before
  bool fits = true;         // no message is longer than its receive; else its sender is lost
};

class FakeNetwork {
 public:
  FakeNetwork(int ranks, Manner manner);
  ~FakeNetwork();
  std::shared_ptr<Link> link(int rank);
  // The rank is gone, and with it what it has sent and nobody has received yet, or part of it;
  // unless `loses` is false: then its connections end behind what it has sent.
  void kill(int rank, bool loses = true);
  // Delivers to a rank what may be delivered, as its own progress() does: what a transport with
  // threads of its own does while nobody looks.
  void deliver(int rank);
  // While held, nothing of lanes from `first` on is delivered.
  void hold_from(int first);
  void release() { hold_from(1 << 30); }
  // Changes what arrives of operations' messages, from now on; called on the thread that delivers.
  using Spoil = std::function<void(int sender, int receiver, std::byte* data, std::size_t bytes)>;
  void spoil_with(Spoil spoil) { spoil_ = std::move(spoil); }
  // Receives of a rank that nothing has come for.
  std::size_t posted(int rank) const;
  // Messages that were delivered.
  std::uint64_t delivered() const;

 private:
  class End;
  struct Station;
  std::vector<std::unique_ptr<Station>> stations_;
  const Manner manner_;
  Spoil spoil_;
  std::atomic<int> held_from_{1 << 30};
};

}  // namespace pycollective::testing
