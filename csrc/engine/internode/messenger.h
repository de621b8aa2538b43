// The layer between operations and a link to other hosts: messages under way and their memory,
// calls, failures, goodbyes, lost ranks.
//
// Memory. The library's own messages lie in message buffers, which belong to the messenger while
// the link uses them. Messages of operations lie where the operation says. A failed operation gives
// up its messages under way: they are cancelled. If the link still uses their memory after
// kGiveUpWithin, the messenger keeps that memory alive, for ever if need be.
//
// Failures. The rank that finds a failure tells every rank of other hosts. A rank that hears of one
// passes it on to those that it has exchanged messages with. So it reaches all ranks that wait for
// each other, even if the first one dies in the middle. A rank that closes says goodbye, so that
// its end is not taken for a death.
//
// What the link throws is this rank's own trouble (no memory, say). It passes through, and no other
// rank is blamed. The link reports ranks that it cannot reach as lost.
//
// A rank's memory and messages grow with the ranks that it talks to. A message to all is sent to
// each once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/call_signature.h"
#include "engine/internode/link.h"

namespace pycollective {

// The library's own messages between hosts. Each has a header with its length: a transport need not
// tell how long a message was.
enum class MessageKind : std::uint8_t { kCall, kFailure, kGoodbye, kReminder };

struct MessageHeader {
  std::uint64_t communicator;
  std::uint32_t magic;
  std::uint32_t bytes;  // that follow
  std::int32_t sender;  // rank
  MessageKind kind;
  std::uint8_t failure;  // FailureKind, of a failure
  std::uint16_t unused;
};
static_assert(sizeof(MessageHeader) == 24);

// The memory of one such message. The link uses it while the message is under way.
class MessageBuffer {
 public:
  static constexpr std::uint32_t kMagic = 0x70634d33;  // last digit: version of the format

  MessageBuffer() = default;
  explicit MessageBuffer(std::size_t body_bytes)
      : body_bytes_(body_bytes), memory_(new std::byte[sizeof(MessageHeader) + body_bytes]) {}

  explicit operator bool() const { return memory_ != nullptr; }
  std::size_t body_bytes() const { return body_bytes_; }
  MessageHeader& header() { return *reinterpret_cast<MessageHeader*>(memory_.get()); }
  const MessageHeader& header() const { return *reinterpret_cast<MessageHeader*>(memory_.get()); }
  std::byte* body() const { return memory_.get() + sizeof(MessageHeader); }

  std::byte* data() const { return memory_.get(); }
  std::size_t capacity() const { return sizeof(MessageHeader) + body_bytes_; }
  std::size_t length() const { return sizeof(MessageHeader) + header().bytes; }
  // Whether a whole message has arrived.
  bool is_sound() const {
    const MessageHeader& head = header();
    return head.magic == kMagic && head.bytes <= body_bytes_ && head.kind <= MessageKind::kReminder;
  }

 private:
  std::size_t body_bytes_ = 0;
  std::unique_ptr<std::byte[]> memory_;
};

// What a rank has called, and under which number: the body of a call.
struct NumberedCall {
  std::uint64_t sequence = 0;
  CallSignature called;

  bool agrees(const NumberedCall& other) const {
    return sequence == other.sequence && agree(called, other.called);
  }
  std::string describe() const {
    return pycollective::describe(called) + " as number " + std::to_string(sequence);
  }
};

// The longest message that goes with its call: to copy it costs less than another message.
constexpr std::size_t kEagerBytes = std::size_t{8} << 10;

constexpr std::size_t kCallBytes = sizeof(NumberedCall) + kEagerBytes;
constexpr std::size_t kMostSpare = 64;  // buffers kept for later calls

// A message of an operation.
struct MessageHandle {
  // The message was lost: never done.
  static constexpr Link::Transfer kSpent = ~Link::Transfer{0};

  Link::Transfer transfer = 0;  // 0: done, or none
  int rank = 0;
};

// Thread-safe, except for staging(), which is for the thread that drives the collectives.
class Messenger {
 public:
  // A failure that a rank of another host reports, or that this messenger has found.
  struct Notice {
    FailureKind kind = FailureKind::kNone;
    int reporter = 0;
    std::string report;
  };

  // For rank `rank` of communicator `id`. `ranks`: those of other hosts, ascending.
  Messenger(std::shared_ptr<Link> link, std::uint64_t id, int rank, std::vector<int> ranks,
            std::function<void()> wake);
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // The ranks of other hosts, ascending.
  const std::vector<int>& ranks() const { return ranks_; }
  // Whether the link wakes a sleeping thread when something has happened, so that it need not poll.
  bool link_wakes() const { return link_wakes_; }
  // Makes progress. To be called while anything is awaited.
  void poll();

  // What was sent since the start, with the library's own messages and headers.
  struct Traffic {
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
    std::uint64_t raw_bytes = 0;  // what `bytes` would be without packing
  };
  Traffic sent() const;

  // Messages of operations. Both sides know the length, or the receiver knows the capacity. The
  // link uses the memory until done() or give_up(). `raw_bytes`: the message's length before
  // packing.
  MessageHandle send(int rank, int lane, const void* data, std::size_t bytes,
                     std::size_t raw_bytes);
  MessageHandle receive(int rank, int lane, void* data, std::size_t bytes);
  // Whether it is done; if so, the handle is reset.
  bool done(MessageHandle& handle);
  // What done() would return; the handle stays.
  bool has_come(const MessageHandle& handle);
  // Ends what an operation leaves under way. `keep` lives as long as the link uses any of it.
  void give_up(std::vector<MessageHandle> handles, std::shared_ptr<const void> keep) noexcept;

  // A call with so many bytes of data behind it, to be filled in and sent.
  MessageBuffer make_call(const NumberedCall& note, std::size_t data_bytes);
  static std::byte* data_of(const MessageBuffer& call) {
    return call.body() + sizeof(NumberedCall);
  }
  static std::size_t data_bytes_of(const MessageBuffer& call) {
    return call.header().bytes - sizeof(NumberedCall);
  }
  static NumberedCall note_of(const MessageBuffer& call);
  void send_call(int rank, int lane, MessageBuffer call);
  // Both at once. `expects`: also expect_call() on lane `answer`.
  void send_and_expect_call(int rank, int lane, MessageBuffer call, int answer, bool expects);
  // From here until take_call() or forget_call() the rank counts as awaited.
  void expect_call(int rank, int lane);
  // Empty while it has not come. `more`: another will come on this lane, so post its receive.
  MessageBuffer take_call(int rank, int lane, bool more);
  void forget_call(int rank);
  // Takes a call that another operation may await: the rank still counts as awaited, and the call
  // as one that has come, until count_heard() takes that back. `needed`: report a loss if the lane
  // has ended without it.
  MessageBuffer hear_call(int rank, int lane, bool more, bool needed);
  void count_heard(int rank, int calls);
  void open_call(int rank, int lane);
  // Between the two calls, any lost rank is a failure. A rank that has left is none.
  void await_anyone(bool begins);
  bool anyone_is_there() const;       // of the ranks of other hosts
  void put_back(MessageBuffer call);  // for reuse

  // A rank that has waited long tells others what it has called. So ranks that wait for each other
  // in different calls find that out, whatever messages these calls exchange.
  void remind(const std::vector<int>& ranks, const NumberedCall& note);
  // A rank that has called something else under the same number.
  std::optional<std::pair<int, NumberedCall>> find_other_call(const NumberedCall& mine) const;

  // Sends to all other ranks, now and then, what they ignore: so a later poll() finds those that
  // cannot be reached, also where no message is under way.
  void probe();
  // The ranks that have said goodbye or cannot be reached any more, as of the last poll().
  std::vector<int> gone() const;
  // The first failure that was heard of, or that an awaited rank is lost.
  std::shared_ptr<const Notice> notice() const;
  // Does not wait. `first`: this rank has found the failure.
  void tell(const Notice& notice, bool first) noexcept;

  // Memory for messages; the same memory for each call with the same index.
  std::byte* staging(std::size_t index, std::size_t bytes);

  // Says goodbye and closes the link. Idempotent. Returns whether the link has stopped using all
  // memory; if not, none of that memory may be used again.
  bool close() noexcept;
  // After close(): whether the link stays open until all others have said goodbye
  // (defer_close), and whether that has happened by now.
  bool close_is_deferred() const { return close_is_deferred_; }
  bool has_ended() noexcept;
  // At the end of the process: stops listening and leaves the link open.
  void stop_listening() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Inbox {  // for one rank's calls on one lane
    Link::Transfer transfer = 0;
    MessageBuffer buffer;
    bool come = false;  // misses() has seen it, and nobody has taken it
  };
  struct Peer {
    int awaited = 0;                        // messages and calls of operations
    int heard = 0;                          // how many of these are calls that have come
    std::vector<Link::Transfer> under_way;  // the messages among them
    bool needed = false;                    // one of them was lost
    bool talked = false;
    // When it said goodbye, or when an earlier message came after that.
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
  MessageBuffer buffer(std::size_t body_bytes);
  void post(MessageBuffer buffer, MessageKind kind, std::size_t bytes, int rank, int lane);
  void say(MessageKind kind, FailureKind failure, const void* body, std::size_t bytes, int rank);
  void count(std::size_t bytes, std::size_t raw_bytes);
  void hear();
  void take_in(const MessageBuffer& message);
  void listen(Inbox& inbox);
  bool knows(const MessageBuffer& message) const;  // whether it is this communicator's
  void open(Peer& peer, int lane, int rank);
  MessageBuffer next_call(Peer& peer, int rank, int lane, bool more, bool needed);
  // A transfer's outcome; the link reports its end once.
  Link::Outcome look_at(Link::Transfer transfer);
  // Whether it is done; keeps the outcome for look_at(). Sets `news` when it sees the end first.
  bool is_seen_done(Link::Transfer transfer, bool& news);
  // Whether something awaited of it has not come, and nothing has come since the last call.
  bool misses(Peer& peer);
  static void note_news(Peer& peer);
  void close_handle(const MessageHandle& handle);
  void forget(Peer& peer, Link::Transfer transfer);
  void reap(bool all);
  std::vector<Orphan> take_ended_orphans();  // the caller destroys them without the lock
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
  const bool link_wakes_;
  mutable std::mutex mutex_;
  std::unordered_map<int, Peer> peers_;  // made on first contact
  int awaited_ = 0;                      // of all peers
  Traffic traffic_;
  // Outcomes that is_seen_done() has seen, and the operation has not.
  std::unordered_map<Link::Transfer, Link::Outcome> seen_;
  std::vector<Inbox> control_;  // where failures, goodbyes and reminders arrive
  std::size_t oldest_ = 0;      // of control_
  Clock::time_point listen_again_{};
  Clock::time_point probe_again_{};
  std::vector<Sent> sent_;
  std::size_t reap_at_ = 16;
  std::vector<MessageBuffer> spare_;
  std::vector<Orphan> orphans_;
  std::optional<Clock::time_point> give_up_until_;  // one deadline for all that is given up
  std::vector<std::vector<std::byte>> staging_;
  std::shared_ptr<const Notice> notice_;
  std::atomic<bool> has_notice_{false};
  std::atomic<bool> has_losses_{false};
  bool failed_ = false;  // has sent, or heard of, a failure
  bool closing_ = false;
  bool let_go_ = true;
  std::atomic<bool> close_is_deferred_{false};
};

// Links over MPI close only once every rank has said goodbye.
//
// MPI gives the number of a freed communicator to the next one, and Open MPI counts the messages of
// each: a late message for the old communicator would upset the new. So a link over MPI is closed
// only when nothing can come any more: each rank's goodbye is its last message. The next
// communicator that is made checks whether earlier ones have heard all goodbyes. What is left at
// the end of the process, or after a failure, MPI itself ends.
// These are for all messengers of this process. Thread-safe.
void defer_close(std::shared_ptr<Messenger> messenger);
void finish_deferred_closes();
// At the end of the process.
void give_up_deferred_closes();

}  // namespace pycollective
