// The ranks of one communicator that share a host, its members, as one of them sees them:
// mailboxes, flags, failure, sleep.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/api.h"
#include "shared_memory/node.h"

namespace pycollective {

class Link;
class Messages;
class Messenger;

// A communicator's ranks, on however many hosts, where the group that shares memory is some of
// them.
struct World {
  std::uint64_t id = 0;  // the same on all ranks, and another for each communicator
  int rank = 0;
  int size = 1;
  std::vector<int> local_ranks;  // the rank of each member of the group
  std::shared_ptr<Link> link;    // to the others; none where there are none
  int on_machine = 1;            // ranks on this machine, where it plays several hosts
};

// A cause of failure as it travels: one word, written into every member's mailbox; the account in
// words stands in the reporter's mailbox.
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
  // `tokens` and `offsets`: each member's segment and where its mailbox lies in it; `mailbox` is
  // the own one; `data_bytes` the least data area among all members. All tokens must be attached.
  Group(std::shared_ptr<Node> node, Member me, const std::vector<Token>& tokens,
        const std::vector<std::size_t>& offsets, const MailboxRange& mailbox,
        std::size_t data_bytes, World world = {});
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Member me() const { return me_; }
  int size() const { return size_; }  // members
  Members members() const { return Members(size_); }
  Node& node() const { return *node_; }

  // How long a wait is that is worth a line on stderr.
  std::chrono::duration<double> warn_after() const { return warn_after_; }

  // The communicator, of which the group may be the part on one host: its ranks are the numbers
  // that a user sees or gives.
  const World& world() const { return world_; }
  // To ranks of other hosts; null where there are none.
  Messenger* messenger() const { return messenger_.get(); }
  // What must live as long as a message of this request is under way.
  std::shared_ptr<const void> keep(const Request& request) const;
  int rank_of(Member member) const { return world_.local_ranks[member.at()]; }
  // None for a rank of another host.
  std::optional<Member> member_of(int rank) const;

  std::size_t data_bytes() const { return data_bytes_; }

  Mailbox& mailbox(Member member) const { return *mailboxes_[member.at()]; }
  Mailbox& own() const { return *mailboxes_[me_.at()]; }
  std::byte* data(Member member) const {
    return reinterpret_cast<std::byte*>(mailboxes_[member.at()]) + mailbox_header_bytes(size_);
  }
  // Behind the small buffers: where the slots of larger messages begin, and how many bytes there
  // are for them. Each operation cuts this up for itself.
  std::byte* slots(Member member) const {
    return data(member) + 2 * small_buffer_bytes(data_bytes_);
  }
  std::size_t slots_bytes() const { return data_bytes_ - 2 * small_buffer_bytes(data_bytes_); }
  // The half that `member` writes of its channel to, or from, `peer`.
  SendingHalf& sending_half(Member member, Member peer) const {
    return *reinterpret_cast<SendingHalf*>(half(member, peer.index()));
  }
  ReceivingHalf& receiving_half(Member member, Member peer) const {
    return *reinterpret_cast<ReceivingHalf*>(half(member, size_ + peer.index()));
  }
  // What this rank alone knows of its messages to and from others.
  Messages& messages() const { return *messages_; }
  std::byte* segment_of(Member member, std::size_t offset) const {
    return members_[member.at()]->segment().at(offset);
  }
  // Memory for an own channel, given back with the mailbox.
  std::size_t allocate_channel_buffer(std::size_t bytes);

  // Stores a flag of the own mailbox with release order, then wakes who sleeps.
  void publish(std::atomic<std::uint64_t>& flag, std::uint64_t value) {
    // Store, then load; a sleeper sets its bit, then looks at the flag. With both sides in this
    // order either the sleeper sees the flag, or this load sees the bit. (The sleeper's look is an
    // acquire load; where a CPU lets that pass its read-modify-write, the 50 ms limit of a sleep
    // still ends it.)
    flag.store(value, std::memory_order_seq_cst);
    if (sleepers().load(std::memory_order_seq_cst) & ~bit(me_)) wake_peers();
  }

  // Sleeping: announce(), look once more whether there is something to do, then wait at the
  // doorbell for what it read before.
  std::uint32_t doorbell() const { return node_->own()->segment().header().doorbell.load(); }
  void announce_sleep() { sleepers().fetch_or(bit(me_), std::memory_order_seq_cst); }
  void sleep(std::uint32_t doorbell, std::chrono::nanoseconds limit) const;
  // Wakes this process's own threads: what one of them waits for another has done.
  void ring_own() const { node_->own()->ring(); }

  // Tells every member. The first cause wins in each mailbox; needs no peer to be alive. One thread
  // at a time, and not after leave(): the memory may serve another group by then.
  void fail(FailureKind kind, const std::string& report);
  // The cause that reached this member first, if any.
  FailureRecord failure() const {
    FailureRecord record = FailureRecord::unpack(own().failure.load(std::memory_order_acquire));
    // Shared memory may be wrong: nobody is asked for that there is not.
    if (record.reporter.index() >= size_) record.reporter = me_;
    return record;
  }
  std::string report_of(Member reporter) const;

  bool has_left(Member member) const {
    return (own().left.load(std::memory_order_acquire) & bit(member)) != 0;
  }
  bool alive(Member member) const { return members_[member.at()]->alive(); }
  std::string describe(Member member) const;  // "rank 3 (pid 1234)"

  // After this the group touches no peer's memory; the own mailbox is given back when all others
  // have left too, and have unmapped what is this rank's. Idempotent.
  void leave();
  // What peers map, or will, of another kind of memory, and this rank of theirs: until it has left,
  // and they have. In place of what was given before; nullptr: none of them does.
  void set_mapped(std::shared_ptr<MappedMemory> mapped);

  // Whether the members have a core each: whoever waits may spin a while.
  bool may_spin() const { return may_spin_; }

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
  bool may_spin_;
  std::atomic<bool> left_{false};
  bool reported_ = false;
};

}  // namespace pycollective
