// What lies in shared memory, and who writes it.
//
// Each process owns one segment. A group of n members, the ranks of one host, has one mailbox in
// each member's segment. A member writes its own mailbox and reads its peers'; the few words that
// peers write are marked. The data area behind it is written by all, as each operation says.
// Behind the mailboxes a segment has regions for the users' arrays (array_heap.h).
// A flag is stored with release order after the data that it announces. Small data share the flag's
// cache line, so one line brings both to each reader.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace pycollective {

// A member of a group that shares memory on one host. A rank of a communicator, in contrast, may be
// on any host and is an `int`. Masks, mailboxes, segments and processes belong to members. Roots,
// messages and all numbers that a user sees belong to ranks. Only Group::rank_of and
// Group::member_of convert between the two.
constexpr int kMaxMembers = 64;  // the width of a mask

class Member {
 public:
  constexpr Member() = default;
  constexpr explicit Member(int index) : index_(index) {}
  constexpr int index() const { return index_; }
  constexpr std::size_t at() const { return static_cast<std::size_t>(index_); }  // in an array
  friend constexpr bool operator==(Member a, Member b) { return a.index_ == b.index_; }
  friend constexpr bool operator!=(Member a, Member b) { return a.index_ != b.index_; }

 private:
  std::int32_t index_ = 0;
};

// All of a group, for loops.
class Members {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(int index) : index_(index) {}
    constexpr Member operator*() const { return Member(index_); }
    constexpr Iterator& operator++() {
      ++index_;
      return *this;
    }
    constexpr bool operator!=(const Iterator& other) const { return index_ != other.index_; }

   private:
    int index_;
  };
  constexpr explicit Members(int size) : size_(size) {}
  constexpr Iterator begin() const { return Iterator(0); }
  constexpr Iterator end() const { return Iterator(size_); }

 private:
  int size_;
};

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kChunkSlots = 3;  // chunks of an execution plan under way at once
// Of regions' ends in a segment: of any system's pages a multiple, as mmap wants.
constexpr std::size_t kRegionStep = std::size_t{2} << 20;
constexpr std::size_t kSegmentBytes = std::size_t{256} << 20;  // virtual; committed as needed
constexpr std::size_t kMostRegions = 32;                       // of arrays
constexpr std::uint64_t kSegmentMagic = 0x7079636f6c6c0009;    // last digits: layout version

using Mask = std::uint64_t;  // bit m: member m
constexpr Mask bit(Member member) { return Mask{1} << member.index(); }
static_assert(8 * sizeof(Mask) == kMaxMembers);

struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t token[2];
  std::uint64_t address;            // where its process has mapped this header
  std::atomic<std::uint32_t> gone;  // 1 once its process has stopped using it, and may live on
  alignas(kLine) std::atomic<std::uint32_t> doorbell;  // futex; peers add 1, then wake
  // Where the regions of arrays (Segment::array_at) end in the file: each begins where the one
  // before it ends, the first behind the mailboxes. 0: not there yet. The owner adds regions, and
  // takes none away.
  alignas(kLine) std::atomic<std::uint64_t> region_ends[kMostRegions];
};
static_assert(sizeof(SegmentHeader) <= kPage);

// All of a call that ranks must agree on (engine/call_signature.h). Without padding.
struct CallSignature {
  struct Message {
    std::int32_t tag;
    std::uint16_t lane_sequence;  // of its data lane (engine/messages.h)
    std::uint16_t lane;
  };
  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;
  std::uint8_t reduce_op = 0;
  std::uint8_t how = 0;  // the wire, and flags
  std::int32_t root = 0;
  std::uint64_t count = 0;  // elements; or of dealt nodes with uneven counts their hash
  union {
    std::uint64_t counts_hash = 0;  // of uneven counts; 0 for equal ones
    double divisor;                 // of an average of dealt nodes
    Message message;                // of a send or receive
  };
  char algorithm[20] = {};  // that was asked for; empty for the direct paths
  std::uint32_t deal = 0;   // of dealt nodes, the upper half of the deal's digest
};
static_assert(sizeof(CallSignature) == 48);

// "I have called operation `sequence`, and this is what I called." Two lines are used in turn: a
// rank writes number s + 2 only after all have arrived at s + 1, so they have read s.
struct alignas(kLine) Arrival {
  std::atomic<std::uint64_t> sequence;  // written last
  CallSignature called;
  std::uint64_t input;  // where the rank's input lies (engine/operations/input_place.h)
};

// A send that waits for its receive. `number` counts the sends of one direction of a pair, from 1.
// What follows it stays unchanged until the receiver has granted it.
struct Announcement {
  std::atomic<std::uint64_t> number;  // written last
  std::int32_t tag;
  std::uint32_t dtype;
  std::uint64_t count;
  // The first chunk's number, if it lies in the buffer; or where the receiver may read all of it in
  // the sender's process, plus kSingleCopy; else kNoChunk.
  std::uint64_t chunk;
};
constexpr std::uint64_t kNoChunk = ~std::uint64_t{0};
constexpr std::uint64_t kSingleCopy = std::uint64_t{1} << 63;

// The channel of one direction of a pair: the sender's half lies in the sender's mailbox, the
// receiver's half in the receiver's. `chunks` counts chunks written (sender) or read (receiver)
// since the start; a message that is empty, or that the receiver reads in the sender's memory,
// counts as one. Between messages both are equal.
struct alignas(kLine) SendingHalf {
  Announcement first;                 // the others lie behind the buffer
  std::atomic<std::uint64_t> chunks;  // written into the buffer
  std::atomic<std::uint64_t> places;  // how many announcements to look at
  std::uint64_t buffer;               // offset in the sender's segment
  // One more than the number of the second early chunk, if it was written before the grant.
  std::atomic<std::uint64_t> early_end;
};
struct alignas(kLine) ReceivingHalf {
  std::atomic<std::uint64_t> granted;  // number of an announcement; written after the next three
  std::uint64_t dtype;
  std::uint64_t count;
  std::uint64_t single_copy;          // 1: the receiver reads the message in the sender's memory
  std::atomic<std::uint64_t> chunks;  // read from the buffer
};
struct Mailbox {
  Arrival arrival[2];
  // SingleCopy counts one chunk: in `combined` once this rank reads no more of the
  // inputs, before that in `copied_in` if it could not read one.
  struct alignas(kLine) {
    std::atomic<std::uint64_t> copied_in;  // chunks whose leaves peers may read, since the start
    std::atomic<std::uint64_t> combined;   // chunks whose results peers may read, since the start
  } progress;
  // For each slot: which chunk is under way there, and how much of it peers may read.
  struct alignas(kLine) {
    std::atomic<std::uint64_t> mark;
  } published[kChunkSlots];
  // Peers write the next four words. Member m alone sets bit m of a mask.
  // A member sleeps and wants to be woken; the peer that wakes it clears the bit. Only the mask in
  // member 0's mailbox is used, by all: one line that stays shared in every cache while nobody
  // sleeps.
  alignas(kLine) std::atomic<Mask> sleepers;
  alignas(kLine) std::atomic<std::uint64_t> failure;  // written by any member: the first cause
  std::atomic<Mask> left;                             // members that touch no data here any more
  // Members that do not map GPU memory of the owner any more. Set just before `left` where there is
  // none, else when it was unmapped, which may be long after.
  std::atomic<Mask> unmapped;
  // Written by the owner: the number of members, and the length of its data area. A peer that looks
  // in a wrong place finds other numbers.
  std::uint64_t members;
  std::uint64_t data_bytes;
  // Where the thread was that last drove an operation of the owner: a core's number plus 1, or 0.
  // Written only when it changes, as seldom as the words above, so that peers keep the line.
  std::atomic<std::uint32_t> core;
  alignas(kLine) char report[1024];  // the message of a failure that the owner reports
};

// A mailbox is followed by its halves of channels (to each peer, then from each peer) and its data
// area: two small buffers, one after the other, and slots in all that is left (Group::slots).
constexpr std::size_t mailbox_header_bytes(int members) {
  return (sizeof(Mailbox) + 2 * static_cast<std::size_t>(members) * kLine + kPage - 1) / kPage *
         kPage;
}
// Bytes of one small buffer in a data area of this size.
constexpr std::size_t small_buffer_bytes(std::size_t data_bytes) {
  const std::size_t share = data_bytes / 8 / kLine * kLine;
  return share < (std::size_t{64} << 10) ? share : std::size_t{64} << 10;
}

static_assert(sizeof(Arrival) == kLine && sizeof(SendingHalf) == kLine &&
              sizeof(ReceivingHalf) == kLine);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "flags must work across processes");

// Waits in Linux on a word of shared memory (a futex).
// Returns when woken, when the word is not `expected`, on a signal, or after `limit`.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds limit) {
  timespec span;
  span.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  span.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &span, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace pycollective
