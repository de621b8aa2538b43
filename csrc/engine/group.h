// The ranks of one communicator on one host, its members, as one of them sees them: mailboxes,
// flags, failures, sleep.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/api.h"
#include "engine/chooser.h"
#include "shared_memory/node.h"

namespace pycollective {

class Link;
class Messages;
class Messenger;

// All ranks of a communicator. The group that shares memory is those of one host.
struct World {
  std::uint64_t id = 0;  // the communicator's: the same on all its ranks
  int rank = 0;
  int size = 1;
  std::vector<int> local_ranks;  // the rank of each member of the group
  std::shared_ptr<Link> link;    // to the others; none where there are none
  int on_machine = 1;            // ranks on this machine, which may simulate several hosts
};

// A failure as it travels: one word, written into every member's mailbox. The message stands in the
// reporter's mailbox.
struct FailureRecord {
  FailureKind kind = FailureKind::kNone;
  Member reporter;

  // A member needs fewer than the 8 bits that it has.
  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(kind) << 8 | static_cast<std::uint64_t>(reporter.index());
  }
  static FailureRecord unpack(std::uint64_t word) {
    return {static_cast<FailureKind>(word >> 8), Member(static_cast<int>(word & 0xff))};
  }
};

class Group {
 public:
  // `tokens` and `offsets`: each member's segment, and where its mailbox lies in it. `mailbox`: the
  // own one. `data_bytes`: the smallest data area of any member. All tokens must be attached.
  Group(std::shared_ptr<Node> node, Member me, const std::vector<Token>& tokens,
        const std::vector<std::size_t>& offsets, const MailboxRange& mailbox,
        std::size_t data_bytes, World world = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Member me() const { return me_; }
  int size() const { return size_; }  // members
  // The member `steps` further around: so members that visit all do not meet at one.
  Member after_me(int steps) const { return Member((me_.index() + steps) % size_); }
  Members members() const { return Members(size_); }
  Node& node() const { return *node_; }

  // A wait that is longer writes a line to stderr.
  std::chrono::duration<double> warn_after() const { return warn_after_; }

  // The communicator's ranks: the numbers that a user sees and gives.
  const World& world() const { return world_; }
  // To ranks of other hosts; null where there are none.
  Messenger* messenger() const { return messenger_.get(); }
  // What must stay alive as long as a message of this request is under way.
  std::shared_ptr<const void> keep(const Request& request) const;
  int rank_of(Member member) const { return world_.local_ranks[member.at()]; }
  // Null for a rank of another host.
  std::optional<Member> member_of(int rank) const;

  std::size_t data_bytes() const { return data_bytes_; }

  Mailbox& mailbox(Member member) const { return *mailboxes_[member.at()]; }
  Mailbox& own() const { return *mailboxes_[me_.at()]; }
  std::byte* data(Member member) const {
    return reinterpret_cast<std::byte*>(mailboxes_[member.at()]) + mailbox_header_bytes(size_);
  }
  // Behind the small buffers: the slots of larger messages, and their bytes in all. Each operation
  // divides them as it needs.
  std::byte* slots(Member member) const {
    return data(member) + 2 * small_buffer_bytes(data_bytes_);
  }
  std::size_t slots_bytes() const { return data_bytes_ - 2 * small_buffer_bytes(data_bytes_); }
  // The half of its channel to, or from, `peer` that `member` writes.
  SendingHalf& sending_half(Member member, Member peer) const {
    return *reinterpret_cast<SendingHalf*>(half(member, peer.index()));
  }
  ReceivingHalf& receiving_half(Member member, Member peer) const {
    return *reinterpret_cast<ReceivingHalf*>(half(member, size_ + peer.index()));
  }
  // This rank's own state of its messages to and from others.
  Messages& messages() const { return *messages_; }
  std::byte* segment_of(Member member, std::size_t offset) const {
    return members_[member.at()]->segment().at(offset);
  }
  // See Segment::array_at.
  std::byte* find_array(Member member, std::uint64_t offset, std::size_t bytes) const {
    return members_[member.at()]->segment().array_at(offset, bytes);
  }
  // Memory for an own channel, freed with the mailbox.
  std::size_t allocate_channel_buffer(std::size_t bytes);

  // Stores a flag of the own mailbox with release order, then wakes sleepers.
  void publish(std::atomic<std::uint64_t>& flag, std::uint64_t value) {
    // This stores the flag, then loads the bits. A sleeper sets its bit, then loads the flag. So
    // either the sleeper sees the flag, or this load sees the bit. (The sleeper's load is an
    // acquire load. If a CPU lets it pass its read-modify-write, the sleep still ends after 50 ms.)
    flag.store(value, std::memory_order_seq_cst);
    if (sleepers().load(std::memory_order_seq_cst) & ~bit(me_)) wake_peers();
  }

  // To sleep: read doorbell(), call announce_sleep(), look once more for something to do, then call
  // sleep() with what doorbell() returned.
  std::uint32_t doorbell() const { return node_->own()->segment().header().doorbell.load(); }
  void announce_sleep() { sleepers().fetch_or(bit(me_), std::memory_order_seq_cst); }
  void sleep(std::uint32_t doorbell, std::chrono::nanoseconds limit) const;
  // Wakes this process's own threads: one may wait for what another has just done.
  void wake_own_threads() const { node_->own()->wake(); }

  // Tells every member of a failure; no peer has to be alive. The first one wins in each mailbox.
  // Allocates nothing. One thread at a time, and not after leave(): the memory may serve another
  // group by then.
  void fail(FailureKind kind, std::string_view report);
  // The failure that reached this member first, if any. Not read before what was read of peers'
  // memory before the last publish().
  FailureRecord failure() const {
    FailureRecord record = FailureRecord::unpack(own().failure.load(std::memory_order_seq_cst));
    // Peers may have written anything: keep the number within the members.
    if (record.reporter.index() >= size_) record.reporter = me_;
    return record;
  }
  std::string report_of(Member reporter) const;

  bool has_left(Member member) const {
    return (own().left.load(std::memory_order_acquire) & bit(member)) != 0;
  }
  bool alive(Member member) const { return members_[member.at()]->alive(); }
  std::string describe(Member member) const;  // "rank 3 (pid 1234)"

  // Copies from a member's process, as Peer::read, at a cost that does not depend on where.
  int read(Member member, void* to, std::uint64_t from, std::size_t bytes) const;
  bool may_read(Member member) const { return members_[member.at()]->refusal() == 0; }
  // Whether the members have found out that all may read each other's memory. The same on all in
  // each collective, as only collectives set it (SingleCopy).
  enum class Reading : std::uint8_t { kUnknown, kAllowed, kForbidden };
  Reading reading() const { return reading_; }
  void set_reading(Reading found) { reading_ = found; }

  // After this the group touches no peer's memory. The own mailbox is freed once all others have
  // left too, and have unmapped this rank's memory. Idempotent.
  void leave();
  // Memory of another kind (GPUs') that the members map of each other: kept until all have left.
  // Replaces what was set before; null: there is none.
  void set_mapped(std::shared_ptr<MappedMemory> mapped);

  // How collectives of one kind and about one size are done: for the thread that drives them.
  struct Ways {
    Chooser stores;  // into slots: plain, or past the caches
    Chooser paths;   // of arrays that peers may read: a single copy, or slots; rank 0 chooses
  };
  Ways& ways(OpKind kind, std::size_t bytes);
  // How small buffers are written, in collectives of that kind.
  Chooser& small_stores(OpKind kind) { return small_stores_[static_cast<std::size_t>(kind)]; }

  // Whether each rank of the machine may have a core to itself, so that a waiting thread may keep
  // its own a while.
  bool may_spin() const { return may_spin_; }
  // Whether this rank's own threads share one core.
  bool has_one_core() const { return has_one_core_; }
  // Tells the members where this thread runs, which drives an operation.
  void publish_core();
  // Whether this thread runs where a member ran last that is not asleep: that one may need this
  // very core.
  bool shares_core() const;
  // Called once in a call that waits, with what shares_core() said. A thread that finds members on
  // its core in several calls moves to a core that is nobody's, where its mask has one.
  void note_shared_core(bool shared);

 private:
  friend struct testing::Inside;
  std::atomic<Mask>& sleepers() const { return mailboxes_[0]->sleepers; }
  std::byte* half(Member member, int index) const {
    return reinterpret_cast<std::byte*>(mailboxes_[member.at()]) + sizeof(Mailbox) +
           static_cast<std::size_t>(index) * kLine;
  }
  void wake_peers();

  std::shared_ptr<Node> node_;
  Member me_;
  int size_;
  std::size_t data_bytes_;
  MailboxRange range_;
  World world_;
  std::chrono::duration<double> warn_after_{30};
  std::array<Mailbox*, kMaxMembers> mailboxes_{};
  std::mutex mapped_mutex_;
  std::shared_ptr<MappedMemory> mapped_;
  std::vector<std::shared_ptr<Peer>> members_;
  std::shared_ptr<Messenger> messenger_;
  std::unique_ptr<Messages> messages_;
  std::mutex channels_mutex_;  // sends to different members start on different threads
  std::vector<std::size_t> channel_buffers_;
  std::size_t channel_buffer_bytes_ = 0;
  bool may_spin_ = false;
  bool has_one_core_ = false;
  const bool may_move_;
  std::atomic<int> shared_waits_{0};  // calls in a row
  std::vector<Ways> ways_;
  std::vector<Chooser> small_stores_;
  Reading reading_ = Reading::kUnknown;
  std::atomic<bool> left_{false};
  bool reported_ = false;
};

}  // namespace pycollective
