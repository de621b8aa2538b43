// The one layer between operations and a link to other hosts: messages under way and whose memory
// they use, calls, failures told and heard, goodbyes, lost ranks.
//
// Memory. What the library sends of its own lies in buffers, which belong to the messenger until
// the link has let go of them. Messages of operations lie where the operation says. An operation
// that fails gives up what is under way: it is cancelled, and if the link has not let go of it
// within kGiveUpWithin, what must live for it is kept, for ever if need be.
//
// Failures. Whoever finds a cause tells every rank of other hosts; whoever hears of one passes it
// on to those that it has exchanged messages with, so that it reaches all who wait for each other
// even if the first teller dies in the middle. A goodbye tells a rank's end from its death.
//
// What the link throws is this rank's own trouble (no memory, say), and passes through: no other
// rank is to be blamed. Those that cannot be reached the link tells as lost.
//
// Memory and messages of a rank grow with the ranks that it talks to; what is told to all is sent
// to each once.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/internode/link.h"
#include "engine/internode/message_buffer.h"

namespace pycollective {

// Data of a call that goes with it, at most: a copy costs less than another message.
constexpr std::size_t kEagerBytes = std::size_t{8} << 10;

constexpr std::size_t kCallBytes = sizeof(NumberedCall) + kEagerBytes;
constexpr std::size_t kMostSpare = 64;  // buffers for calls that are kept for the next

// A message of an operation.
struct MessageHandle {
  // Of a message that was lost: never done.
  static constexpr Link::Transfer kSpent = ~Link::Transfer{0};

  Link::Transfer transfer = 0;  // 0: done, or none
  int rank = 0;
};

// Thread-safe, but for staging(), which is for the one thread that drives the collectives.
class Messenger {
 public:
  // A failure that a rank of another host tells, or that this one has found out.
  struct Notice {
    FailureKind kind = FailureKind::kNone;
    int reporter = 0;
    std::string report;
  };

  // Of communicator `id`, in which this is `rank`; `ranks`: those of other hosts, ascending.
  Messenger(std::shared_ptr<Link> link, std::uint64_t id, int rank, std::vector<int> ranks,
            std::function<void()> bell);
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // Those of other hosts, ascending.
  const std::vector<int>& ranks() const { return ranks_; }
  // Whether news rings the bell, so that who sleeps need not look.
  bool rings() const { return rings_; }
  // Lets all go on: to be called while anything is awaited.
  void poll();

  // What has been handed to the link since the start, headers of the library's own included.
  struct Traffic {
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
    std::uint64_t raw_bytes = 0;  // that it would have been unpacked
  };
  Traffic sent() const;

  // Messages whose length both sides know, or whose capacity the receiver knows. The memory is the
  // link's until done, or given up. `raw_bytes`: what is packed in it.
  MessageHandle send(int rank, int lane, const void* data, std::size_t bytes,
                     std::size_t raw_bytes);
  MessageHandle receive(int rank, int lane, void* data, std::size_t bytes);
  // Whether it is done; then the handle is none.
  bool done(MessageHandle& handle);
  // Whether done() would say so; the handle stays for that.
  bool has_come(const MessageHandle& handle);
  // Ends what an operation leaves under way. `keep` is kept until the link has let go of it all.
  void give_up(std::vector<MessageHandle> handles, std::shared_ptr<const void> keep) noexcept;

  // A call, with room for data that goes with it, to be filled in and sent.
  MessageBuffer make_call(const NumberedCall& note, std::size_t data_bytes);
  static std::byte* data_of(const MessageBuffer& call) {
    return call.body() + sizeof(NumberedCall);
  }
  static std::size_t data_bytes_of(const MessageBuffer& call) {
    return call.header().bytes - sizeof(NumberedCall);
  }
  static NumberedCall note_of(const MessageBuffer& call);
  void send_call(int rank, int lane, MessageBuffer call);
  // Both at once: `expects`, as expect_call(), one on lane `answer`.
  void send_and_expect_call(int rank, int lane, MessageBuffer call, int answer, bool expects);
  // From expect to take, or to forget, the rank counts as awaited.
  void expect_call(int rank, int lane);
  // Nothing while it has not come. `more`: another will come on this lane, so make ready for it.
  MessageBuffer take_call(int rank, int lane, bool more);
  void forget_call(int rank);
  // The same for who hears calls that others await: the rank counts as awaited no less, and the
  // call as one that has come, until count_heard() takes it back. `needed`: it is missed where the
  // lane has ended without it.
  MessageBuffer hear_call(int rank, int lane, bool more, bool needed);
  void count_heard(int rank, int calls);
  void open_call(int rank, int lane);
  // Between the two a lost rank, whichever, is a failure; one that has left is none.
  void await_anyone(bool begins);
  bool anyone_is_there() const;       // of the ranks of other hosts
  void put_back(MessageBuffer call);  // for the next that needs one

  // What is said by who waits long, and heard of whom: so ranks that wait for each other in
  // different calls find out, whatever messages these would exchange.
  void remind(const std::vector<int>& ranks, const NumberedCall& note);
  // A rank that is in another call of this number.
  std::optional<std::pair<int, NumberedCall>> find_other_call(const NumberedCall& mine) const;

  // The first failure that was heard of, or a lost rank that is awaited.
  std::shared_ptr<const Notice> notice() const;
  // Does not wait, and does not throw. `first`: this rank has found it out.
  void tell(const Notice& notice, bool first) noexcept;

  // Memory of this process, for messages; kept for the next that asks with the same index.
  std::byte* staging(std::size_t index, std::size_t bytes);

  // Says goodbye, and lets go of the ranks of other hosts. Idempotent. Whether the link has let go
  // of all memory; if not, none of what it was given may be used again.
  bool close() noexcept;
  // After close(): whether it still listens for the last words of others (lingering.h), and whether
  // it has heard them all, and has let go of the link.
  bool close_is_deferred() const { return close_is_deferred_; }
  bool has_ended() noexcept;
  // At the end of the process: listens no more, and leaves the link to it.
  void stop_listening() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Inbox {  // of one rank's calls on one lane
    Link::Transfer transfer = 0;
    MessageBuffer buffer;
    bool come = false;  // seen by misses(), and not taken
  };
  struct Peer {
    int awaited = 0;                        // messages and calls of operations
    int heard = 0;                          // calls of these that have come and are kept
    std::vector<Link::Transfer> under_way;  // of these the messages
    bool needed = false;                    // one of them was lost
    bool talked = false;
    // When it said goodbye, or what it had sent before came since.
    std::optional<Clock::time_point> left;
    std::optional<Clock::time_point> lost;
    std::string how;
    std::optional<NumberedCall> reminder;
    std::map<int, Inbox> inboxes;  // by lane
  };
  struct Sent {
    Link::Transfer transfer;
    MessageBuffer buffer;
  };
  struct Orphan {
    Link::Transfer transfer;
    std::shared_ptr<const void> keep;
  };

  // All with the lock.
  MessageBuffer buffer(std::size_t room);
  void post(MessageBuffer buffer, MessageKind kind, std::size_t bytes, int rank, int lane);
  void say(MessageKind kind, FailureKind failure, const void* body, std::size_t bytes, int rank);
  void count(std::size_t bytes, std::size_t raw_bytes);
  void hear();
  void take_in(const MessageBuffer& message);
  void listen(Inbox& inbox);
  bool knows(const MessageBuffer& message) const;  // that it is a message of this communicator
  void open(Peer& peer, int lane, int rank);
  MessageBuffer next_call(Peer& peer, int rank, int lane, bool more, bool needed);
  // How it stands; its end is told once.
  Link::Outcome look_at(Link::Transfer transfer);
  // The same, and its end is kept for look_at(). `news`: set where it is seen done the first time.
  bool is_seen_done(Link::Transfer transfer, bool& news);
  // Whether anything that is awaited of it has yet to come, and nothing has come since the last
  // time.
  bool misses(Peer& peer);
  static void note_news(Peer& peer);
  void close_handle(const MessageHandle& handle);
  void forget(Peer& peer, Link::Transfer transfer);
  void reap(bool all);
  std::vector<Orphan> take_ended_orphans();  // to be let go of without the lock
  void look_for_lost();
  bool all_have_left() const;
  bool deaf(std::unique_lock<std::mutex>& lock);
  void set_notice(Notice notice);
  template <class Done>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit,
                const Done& done);

  const std::shared_ptr<Link> link_;
  const std::uint64_t id_;
  const int rank_;
  const std::vector<int> ranks_;
  const bool rings_;
  mutable std::mutex mutex_;
  std::unordered_map<int, Peer> peers_;  // those that there is something to know of
  int awaited_ = 0;                      // of all peers
  Traffic traffic_;
  // How messages ended that is_seen_done() has looked at, and their operations have not.
  std::unordered_map<Link::Transfer, Link::Outcome> seen_;
  std::vector<Inbox> control_;  // where notices arrive
  std::size_t oldest_ = 0;      // of them
  Clock::time_point listen_again_{};
  std::vector<Sent> sent_;
  std::size_t reap_at_ = 16;
  std::vector<MessageBuffer> spare_;
  std::vector<Orphan> orphans_;
  std::optional<Clock::time_point> give_up_until_;  // however much is given up
  std::vector<std::vector<std::byte>> staging_;
  std::shared_ptr<const Notice> notice_;
  std::atomic<bool> has_notice_{false};
  std::atomic<bool> has_losses_{false};
  bool failed_ = false;  // has told, or heard, of a failure
  bool closing_ = false;
  bool let_go_ = true;
  std::atomic<bool> close_is_deferred_{false};
};

}  // namespace pycollective
