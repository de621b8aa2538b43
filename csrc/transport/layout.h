// What lies in shared memory, and who writes it.
//
// Each process owns one segment. A group of n members, the ranks of one host, has one mailbox in
// each member's segment. A member writes its own mailbox and reads its peers'; the few words that
// peers write are marked.
// A flag is stored with release order after the data that it announces, alone on its cache line
// with its own data, so that one line carries both to each reader.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/member.h"

namespace pycollective {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kChunkSlots = 3;  // chunks of a scheduled operation under way at once
constexpr std::size_t kSegmentBytes = std::size_t{256} << 20;  // virtual; committed as needed
constexpr std::uint64_t kSegmentMagic = 0x7079636f6c6c0003;    // last digits: layout version

using Mask = std::uint64_t;  // bit m: member m
constexpr Mask bit(Member member) { return Mask{1} << member.index(); }
static_assert(8 * sizeof(Mask) == kMaxMembers);

struct SegmentHeader {
  std::uint64_t magic;
  std::uint64_t token[2];
  std::atomic<std::uint32_t> gone;  // 1 once its process uses it no more, which may live on
  alignas(kLine) std::atomic<std::uint32_t> doorbell;  // futex; rung by peers, then woken
};

// All of a call that ranks must agree on; engine/called.h writes it and reads it.
struct Called {
  std::uint64_t signature = 0;    // kind, dtype, reduce op, wire, root
  std::uint64_t count = 0;        // elements
  std::uint64_t counts_hash = 0;  // of the uneven counts, 0 for equal ones
  char algorithm[24] = {};        // that was asked for; empty for the direct paths
};

// "I have called operation `sequence`, and this is what I called." Two, used in turn: a rank
// writes number s + 2 only after all have arrived at s + 1, hence have read s.
struct alignas(kLine) Arrival {
  std::atomic<std::uint64_t> sequence;  // written last
  Called called;
};

// One direction of a pair: the sender's half lies in the sender's mailbox, the receiver's half in
// the receiver's. `chunks` counts what was written (sender) or read (receiver) since the start.
struct alignas(kLine) Channel {
  struct Post {
    std::atomic<std::uint64_t> sequence;
    std::uint64_t dtype;
    std::uint64_t count;
  };
  Post post[2];                       // in turn, like Arrival
  std::atomic<std::uint64_t> chunks;  //
  std::uint64_t buffer;               // sender: offset in its segment
};

struct Mailbox {
  Arrival arrival[2];
  struct alignas(kLine) {
    std::atomic<std::uint64_t> copied_in;  // chunks whose leaves peers may read, since the start
    std::atomic<std::uint64_t> combined;   // chunks whose results peers may read, since the start
  } progress;
  // Of the chunk under way in each slot: which, and how much of it peers may read.
  struct alignas(kLine) {
    std::atomic<std::uint64_t> mark;
  } published[kChunkSlots];
  // Bit m: member m sleeps and wants its doorbell rung. Only that of member 0's mailbox is used, by
  // all: one line that stays shared in every cache while nobody sleeps.
  alignas(kLine) std::atomic<Mask> sleepers;
  alignas(kLine) std::atomic<std::uint64_t> failure;  // written by any member: the first cause
  std::atomic<Mask> left;  // bit m is set by member m, which will touch this mailbox no more
  alignas(kLine) char report[448];  // the owner's account of a failure that it reports
};

// A mailbox is followed by its channels (to each peer, then from each peer) and its data area.
constexpr std::size_t mailbox_header_bytes(int members) {
  return (sizeof(Mailbox) + 2 * static_cast<std::size_t>(members) * sizeof(Channel) + kPage - 1) /
         kPage * kPage;
}

static_assert(sizeof(Arrival) == kLine && sizeof(Channel) == kLine);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "flags must work across processes");

}  // namespace pycollective
