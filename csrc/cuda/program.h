// The interpreter of programs on a GPU (program_parameters.h has their words; engine/program.h says
// what they mean).
//
// Each block runs the whole program by itself, over its own chunks of every shard, in its own slots
// of the mailboxes: block b of a rank waits for block b of its peers, and for no other, so blocks
// of a rank need nothing of each other. Chunks follow one another in two slots in turn; which, and
// with what mark, the block reads in its own mailbox, so that a launch can be replayed.
//
//   1. Stage the program, and where its refs lie in this chunk, in shared memory. Wait until the
//      slot is free: who read the chunk before the last has done with it.
//   2. Interpret: all threads of the block carry out each instruction together.
//   3. Tell all members that this block has done with the chunk.
//
// What is published was written by all threads: these meet, then one thread for each member stores
// the mark, with release. A wait is the same the other way round: a thread for each member looks at
// its word, with acquire, then all meet and vote on whether a wait has ended badly.
//
// A wait ends badly at its deadline, counted from its own start, or when the host's abort word is
// not 0, at which it looks once a millisecond. Then the block writes poison into its own mailbox
// and tells the host, and returns; launches that find poison do nothing.
#pragma once

#include "cuda/combine.h"
#include "cuda/copy.h"
#include "cuda/program_parameters.h"

namespace pycollective::cuda {

constexpr std::uint64_t kAbortEvery = 1000 * 1000;  // nanoseconds

// A block's shared memory.
struct Staged {
  std::uint32_t words[kMostWords];
  char* places[kMostRefs];            // of refs, in this chunk
  std::uint32_t endings[kMostPeers];  // by thread: the poison of waits that have ended badly
};

// What combinations are: of one type and operation, or nothing, for what only moves.
template <class Codec, class Op, bool kAverage = false, class Vectors = Codec>
struct Combining {
  template <class Leaf, class Operands>
  DEVICE void run(const Leaf& leaf, const Operands& operand, int count, bool all_leaves,
                  const Combined& what, Share share) {
    combine<Codec, Op, kAverage, Vectors>(leaf, operand, count, all_leaves, what, share);
  }
};
struct Moving {
  template <class Leaf, class Operands>
  DEVICE void run(const Leaf&, const Operands&, int, bool, const Combined&, Share) {}
};

DEVICE std::uint32_t* word_at(void* mailbox, std::uint64_t offset) {
  return reinterpret_cast<std::uint32_t*>(static_cast<char*>(mailbox) + offset);
}

// Where a ref lies in a chunk; null where it is of a buffer that this rank has nothing of.
DEVICE char* place_of(const ProgramParameters& p, std::uint32_t ref, std::uint64_t chunk,
                      std::uint32_t epoch) {
  const auto place = static_cast<PlaceCode>(ref & 3);
  const std::uint64_t number = ref >> 8;
  if (place == PlaceCode::kInput || place == PlaceCode::kOutput) {
    void* const base = place == PlaceCode::kInput ? const_cast<void*>(p.input) : p.output;
    if (base == nullptr) return nullptr;
    return static_cast<char*>(visible(base)) + (p.begins[number] + chunk * p.part) * p.element;
  }
  char* const slot = static_cast<char*>(visible(p.mailboxes[ref >> 2 & 63])) +
                     slots_at(p.shape, block()) + (epoch & 1) * p.shape.slot_bytes;
  if (place == PlaceCode::kNode) return slot + p.part * number * p.node;
  return slot + p.part * (std::uint64_t{p.nodes} * p.node + number * p.element);
}

DEVICE std::uint64_t length_of(const ProgramParameters& p, std::uint32_t shard,
                               std::uint64_t chunk) {
  const std::uint64_t whole = p.begins[shard + 1] - p.begins[shard];
  const std::uint64_t skip = chunk * p.part;
  if (skip >= whole) return 0;
  return whole - skip < p.part ? whole - skip : p.part;
}

// Until the word has come so far: 0, or why not.
DEVICE std::uint32_t wait_for(const ProgramParameters& p, const std::uint32_t* word,
                              std::uint32_t wanted, std::uint32_t member) {
  if (has_come(load_acquire(word), wanted)) return 0;
  const std::uint64_t begin = nanoseconds();
  std::uint64_t looked = begin;
  for (;;) {
    pause();
    if (has_come(load_acquire(word), wanted)) return 0;
    const std::uint64_t now = nanoseconds();
    if (now - begin > p.nanoseconds) return poison_of(Ending::kTimeout, member);
    if (now - looked < kAbortEvery) continue;
    looked = now;
    if (load_host(visible(p.abort)) != 0) return poison_of(Ending::kAborted, member);
  }
}

// If any thread has noted why; none has where there was poison.
DEVICE void poison_mailbox(const ProgramParameters& p, const Staged& staged) {
  if (thread() != 0) return;
  std::uint32_t ending = 0;
  for (std::uint32_t i = 0; ending == 0 && i < p.members; ++i) ending = staged.endings[i];
  if (ending == 0) return;
  ending |= block() << 16;
  store_release(word_at(visible(p.mailboxes[p.me]), kPoisonAt), ending);
  store_release(visible(p.report), ending);
}

// One instruction that moves or combines; `at` is its first word's number.
template <class Combine>
DEVICE void compute(const ProgramParameters& p, const Staged& staged, std::uint32_t at,
                    std::uint64_t chunk) {
  const std::uint32_t* const words = staged.words + at;
  const std::uint32_t head = words[0];
  const Share share{thread(), threads()};
  const std::uint64_t count = length_of(p, head >> 16, chunk);
  if (static_cast<InstructionCode>(head & 7) == InstructionCode::kCopy) {
    copy(staged.places[words[2]], staged.places[words[1]],
         count * ((head & kFlag0) != 0 ? p.node : p.element), share);
    return;
  }
  char* const* const terms = staged.places + words[2];
  const std::uint32_t* const recipe = words + 3;
  const std::uint32_t copy_to = words[1] >> 16;
  const Target target{staged.places[words[1] & 0xFFFF],
                      copy_to == kNoRef ? nullptr : staged.places[copy_to]};
  const auto leaf = [terms](int i) { return static_cast<const char*>(terms[i]); };
  const auto operand = [terms, recipe](int i) {
    return Operand{terms[i], (recipe[i] & 1) != 0, recipe[i] >> 1};
  };
  Combine::run(leaf, operand, static_cast<int>(head >> 8 & 0xFF), (head & kFlag1) != 0,
               Combined{target, count, static_cast<int>(p.members), (head & kFlag0) != 0}, share);
}

// One block's part of a launch.
template <class Combine>
DEVICE void run_program(const ProgramParameters& p) {
  SHARED(Staged, staged);
  void* const mailbox = visible(p.mailboxes[p.me]);
  std::uint32_t* const flags = word_at(mailbox, flags_at(block()));
  const std::uint32_t* const words = visible(p.words);
  const bool has_member = thread() < p.members;
  const bool has_peer = has_member && thread() != p.me;
  // Where this thread's member looks for this rank.
  std::uint32_t* const told =
      has_member ? word_at(visible(p.mailboxes[thread()]), flags_at(block())) + p.me : nullptr;
  bool ends = load_acquire(word_at(mailbox, kPoisonAt)) != 0;
  std::uint32_t epoch = chunk_of(load_acquire(flags + p.me));
  if (has_member) staged.endings[thread()] = 0;
  bool staging = true;

  for (std::uint64_t chunk = block(); chunk < p.chunks; chunk += blocks(), ++epoch) {
    for (std::uint32_t i = thread(); i < (staging ? p.word_count : p.ref_count); i += threads()) {
      const std::uint32_t word = staging ? words[i] : staged.words[i];
      if (staging) staged.words[i] = word;
      if (i < p.ref_count) staged.places[i] = place_of(p, word, chunk, epoch);
    }
    // Of a launch's first two chunks, who read the slot ran another program.
    const bool is_reader = has_peer && (chunk < 2 * blocks() || (p.readers >> thread() & 1) != 0);
    if (is_reader && !ends) {
      staged.endings[thread()] = wait_for(p, flags + thread(), mark_of(epoch - 1, 0), thread());
      ends = staged.endings[thread()] != 0;
    }
    if (barrier_or(ends)) return poison_mailbox(p, staged);
    staging = false;
    for (std::uint32_t at = p.ref_count;;) {
      const std::uint32_t head = staged.words[at];
      const std::uint32_t number = head >> 8 & 0xFF;
      const auto kind = static_cast<InstructionCode>(head & 7);
      if (kind == InstructionCode::kEnd) break;
      if ((head & kMeets) != 0) barrier();
      if (kind == InstructionCode::kWait) {
        if (thread() < number) {
          const std::uint32_t awaited = staged.words[at + 1 + thread()];
          const std::uint32_t member = awaited & 0xFF;
          staged.endings[thread()] =
              wait_for(p, flags + member, mark_of(epoch, awaited >> 8), member);
          ends = staged.endings[thread()] != 0;
        }
        if (barrier_or(ends)) return poison_mailbox(p, staged);
        at += 1 + number;
      } else if (kind == InstructionCode::kPublish) {
        if (has_peer && (p.readers >> thread() & 1) != 0)
          store_release(told, mark_of(epoch, head >> 16));
        ++at;
      } else {
        compute<Combine>(p, staged, at, chunk);
        at += kind == InstructionCode::kCopy ? 3 : (head & kFlag1) != 0 ? 3 : 3 + number;
      }
    }
    barrier();
    if (has_member) store_release(told, mark_of(epoch + 1, 0));
  }
}

}  // namespace pycollective::cuda
