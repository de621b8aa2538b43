// A rank's device mailbox: memory of the library's own on its GPU, which the peers map.
//
//   poison                     a line; not 0 once a wait has ended badly, and for good
//   flags[block][member]       a line a block; its words are marks, each written by one member
//   slots[block][2]            what the block hands over
//
// A mark says how far a block of a member is: (chunk, events published in it), chunks counted for
// ever. Having done with a chunk is the next one's mark without events. So a mark only goes
// forward, and since chunks wrap, marks are compared by their difference. A member pushes its marks
// into every mailbox, so that who waits looks at its own memory alone; its own word in its own
// mailbox is where its block begins next time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics.h"

namespace pycollective::cuda {

constexpr int kMostPeers = 64;  // of a group, itself among them (shared_memory/layout.h)
constexpr std::uint64_t kMailboxLine = 256;
static_assert(kMostPeers * sizeof(std::uint32_t) <= kMailboxLine);

constexpr int kEventBits = 10;  // of a mark
constexpr std::uint32_t kMostEvents = (1U << kEventBits) - 1;
// Of one launch and block: a mark that is older would seem to be ahead. Each launch ends with one.
constexpr std::uint64_t kMostChunks = 1U << (30 - kEventBits);

PYCOLLECTIVE_HD constexpr std::uint32_t mark_of(std::uint32_t chunk, std::uint32_t events) {
  return chunk << kEventBits | events;
}
PYCOLLECTIVE_HD constexpr std::uint32_t chunk_of(std::uint32_t mark) { return mark >> kEventBits; }
PYCOLLECTIVE_HD bool has_come(std::uint32_t mark, std::uint32_t wanted) {
  return static_cast<std::int32_t>(mark - wanted) >= 0;
}

// How large a group's mailboxes are: the same on all ranks.
struct MailboxShape {
  std::uint32_t blocks;      // as many as any launch has
  std::uint64_t slot_bytes;  // a multiple of kMailboxLine
};

constexpr std::uint64_t kPoisonAt = 0;
PYCOLLECTIVE_HD constexpr std::uint64_t flags_at(std::uint32_t block) {
  return kMailboxLine * (1 + std::uint64_t{block});
}
PYCOLLECTIVE_HD constexpr std::uint64_t slots_at(const MailboxShape& shape, std::uint32_t block) {
  return flags_at(shape.blocks) + 2 * shape.slot_bytes * block;
}
PYCOLLECTIVE_HD constexpr std::uint64_t mailbox_bytes(const MailboxShape& shape) {
  return slots_at(shape, shape.blocks);
}

// What poison says: why a wait ended, for which member, in which block.
enum class Ending : std::uint32_t { kNone, kTimeout, kAborted };
PYCOLLECTIVE_HD constexpr std::uint32_t poison_of(Ending ending, std::uint32_t member) {
  return static_cast<std::uint32_t>(ending) | member << 8;
}

}  // namespace pycollective::cuda
