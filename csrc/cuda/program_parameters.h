// A program as kernels interpret it (engine/plans/program.h says what programs are), and what a
// launch adds to it: shared by host and kernels.
//
// The words of a program are its refs, then its instructions. A ref is a piece of memory of each
// chunk:
//     bits 0-1 the place   2-7 the member   8-31 of a slot: the index; of the caller's: the begin
// An instruction is a word, and more behind it:
//     bits 0-2 the kind   3 all threads meet before it   4, 5 flags   8-15 a number   16- a shard
//   end
//   wait      number: how many members        a word for each: member | events << 8
//   publish   shard: events, of this chunk so far
//   copy      flag 0: nodes                    ref from, ref to
//   combine   flag 0: finish, 1: all leaves    number: of terms
//             ref out | ref copy << 16 (kNoRef: none), the first term's ref | ...
//             The refs of terms follow each other. Unless it is of all leaves, a word for each
//             term: how many combinations follow its taking << 1 | whether it is a node.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/mailbox.h"

namespace pycollective::cuda {

enum class PlaceCode : std::uint32_t { kInput, kOutput, kNode, kItem };
enum class InstructionCode : std::uint32_t { kEnd, kWait, kPublish, kCopy, kCombine };

constexpr std::uint32_t kMeets = 1U << 3;
constexpr std::uint32_t kFlag0 = 1U << 4;
constexpr std::uint32_t kFlag1 = 1U << 5;
constexpr std::uint32_t kNoRef = 0xFFFF;

// As much as a block stages in shared memory.
constexpr std::uint32_t kMostWords = 4096;
constexpr std::uint32_t kMostRefs = 2048;
// Operands that a combination keeps while it computes another: the order's depth of 64 leaves.
constexpr int kMostKept = 6;

constexpr int kMostShards = 64;
constexpr int kNoBegin = kMostShards + 1;  // of a buffer that holds one shard

struct ProgramParameters {
  void* mailboxes[kMostPeers];  // of each member, as they are mapped here
  const std::uint32_t* words;   // the device's
  const void* input;            // null where this rank has none, or no element of it
  void* output;
  const std::uint32_t* abort;             // in the host's memory: not 0: give up
  std::uint32_t* report;                  // likewise: where poison is told
  std::uint64_t begins[kMostShards + 2];  // of shards, in elements; the end; and 0
  std::uint64_t part;                     // elements of each shard in a chunk
  std::uint32_t chunks;                   // of the longest shard, at least one a block
  std::uint64_t nanoseconds;              // that a wait may last
  std::uint64_t readers;                  // mask of the members that wait for events
  MailboxShape shape;
  std::uint32_t word_count;
  std::uint32_t ref_count;
  std::uint32_t members;
  std::uint32_t me;
  std::uint32_t nodes;    // places of nodes in a slot: items lie behind them
  std::uint32_t element;  // bytes
  std::uint32_t node;     // bytes of a node's element
};
static_assert(sizeof(ProgramParameters) <= 4096, "a kernel's parameters");

}  // namespace pycollective::cuda
