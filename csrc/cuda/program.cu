// The interpreter of programs on a GPU (program_parameters.h has their words;
// engine/plans/program.h says what they mean): a kernel for each dtype and reduce operation,
// program_<dtype>_<op>, and program_move for programs that combine nothing.
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
#include "cuda/combine.h"
#include "cuda/program_parameters.h"

namespace pycollective::cuda {

// How often a wait looks at the abort word, in nanoseconds. 0: never, which only measures what the
// look costs (benchmarks/gpu/abort_look.cpp).
#if !defined(PYCOLLECTIVE_ABORT_EVERY)
#define PYCOLLECTIVE_ABORT_EVERY 1000000
#endif
constexpr std::uint64_t kAbortEvery = PYCOLLECTIVE_ABORT_EVERY;

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
DEVICE char* place_of(const ProgramParameters& p, std::uint32_t ref, std::uint32_t chunk,
                      std::uint32_t epoch) {
  const auto place = static_cast<PlaceCode>(ref & 3);
  const std::uint64_t number = ref >> 8;
  if (place == PlaceCode::kInput || place == PlaceCode::kOutput) {
    void* const base = place == PlaceCode::kInput ? const_cast<void*>(p.input) : p.output;
    if (base == nullptr) return nullptr;
    return static_cast<char*>(visible(base)) +
           (p.begins[number] + std::uint64_t{chunk} * p.part) * p.element;
  }
  char* const slot = static_cast<char*>(visible(p.mailboxes[ref >> 2 & 63])) +
                     slots_at(p.shape, block()) + (epoch & 1) * p.shape.slot_bytes;
  if (place == PlaceCode::kNode) return slot + p.part * number * p.node;
  return slot + p.part * (std::uint64_t{p.nodes} * p.node + number * p.element);
}

// What a ref in shared memory is: of global memory, which lets the compiler tell stores to it from
// shared memory.
DEVICE char* global(char* place) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(place));
#endif
  return place;
}

DEVICE std::uint64_t length_of(const ProgramParameters& p, std::uint32_t shard,
                               std::uint32_t chunk) {
  const std::uint64_t whole = p.begins[shard + 1] - p.begins[shard];
  const std::uint64_t skip = std::uint64_t{chunk} * p.part;
  if (skip >= whole) return 0;
  return whole - skip < p.part ? whole - skip : p.part;
}

// The word of this block in a member's mailbox that another writes.
DEVICE std::uint32_t* flag_of(const ProgramParameters& p, std::uint32_t member,
                              std::uint32_t writer) {
  return word_at(visible(p.mailboxes[member]), flags_at(block())) + writer;
}

// Until the member's word has come so far: false, and why not is noted, if the wait has ended
// badly.
DEVICE bool has_come_in_time(const ProgramParameters& p, Staged& staged, std::uint32_t wanted,
                             std::uint32_t member) {
  const std::uint32_t* const word = flag_of(p, p.me, member);
  if (has_come(load_acquire(word), wanted)) return true;
  const std::uint64_t begin = nanoseconds();
  std::uint64_t looked = begin;
  for (;;) {
    pause();
    if (has_come(load_acquire(word), wanted)) return true;
    const std::uint64_t now = nanoseconds();
    Ending ending = now - begin > p.nanoseconds ? Ending::kTimeout : Ending::kNone;
    if (kAbortEvery != 0 && now - looked >= kAbortEvery) {
      looked = now;
      if (load_relaxed(visible(p.abort)) != 0) ending = Ending::kAborted;
    }
    if (ending == Ending::kNone) continue;
    staged.endings[thread()] = poison_of(ending, member);
    return false;
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
                    std::uint32_t chunk) {
  const std::uint32_t* const words = staged.words + at;
  const std::uint32_t head = words[0];
  const Share share{thread(), threads()};
  const std::uint64_t count = length_of(p, head >> 16, chunk);
  if (static_cast<InstructionCode>(head & 7) == InstructionCode::kCopy) {
    copy(global(staged.places[words[2]]), global(staged.places[words[1]]),
         count * ((head & kFlag0) != 0 ? p.node : p.element), share);
    return;
  }
  char* const* const terms = staged.places + words[2];
  const std::uint32_t* const recipe = words + 3;
  const std::uint32_t copy_to = words[1] >> 16;
  const Target target{global(staged.places[words[1] & 0xFFFF]),
                      copy_to == kNoRef ? nullptr : global(staged.places[copy_to]),
                      (head & kFlag0) != 0 ? static_cast<int>(p.members) : 1};
  const auto leaf = [terms](int i) { return static_cast<const char*>(global(terms[i])); };
  const auto operand = [terms, recipe](int i) {
    return Operand{global(terms[i]), (recipe[i] & 1) != 0, recipe[i] >> 1};
  };
  Combine::run(leaf, operand, static_cast<int>(head >> 8 & 0xFF), (head & kFlag1) != 0,
               Combined{target, count, static_cast<int>(p.members), (head & kFlag0) != 0}, share);
}

// Marks are this rank's to tell: to the readers, or to all members, itself among them.
DEVICE void tell(const ProgramParameters& p, std::uint64_t members, std::uint32_t mark) {
  if (thread() < p.members && (members >> thread() & 1) != 0)
    store_release(flag_of(p, thread(), p.me), mark);
}

// False if a wait has ended badly, for all threads.
template <class Combine>
DEVICE bool run_chunk(const ProgramParameters& p, Staged& staged, std::uint32_t chunk,
                      std::uint32_t epoch) {
  for (std::uint32_t at = p.ref_count;;) {
    const std::uint32_t head = staged.words[at];
    const std::uint32_t number = head >> 8 & 0xFF;
    const auto kind = static_cast<InstructionCode>(head & 7);
    if (kind == InstructionCode::kEnd) return true;
    if ((head & kMeets) != 0) barrier();
    if (kind == InstructionCode::kWait) {
      bool ends = false;
      if (thread() < number) {
        const std::uint32_t awaited = staged.words[at + 1 + thread()];
        ends = !has_come_in_time(p, staged, mark_of(epoch, awaited >> 8), awaited & 0xFF);
      }
      if (barrier_or(ends)) return false;
      at += 1 + number;
    } else if (kind == InstructionCode::kPublish) {
      tell(p, p.readers, mark_of(epoch, head >> 16));
      ++at;
    } else {
      compute<Combine>(p, staged, at, chunk);
      at += kind == InstructionCode::kCopy || (head & kFlag1) != 0 ? 3 : 3 + number;
    }
  }
}

// Stages the program, and the first chunk's places. What it reads is on its way together; the last
// load keeps back what comes behind it. False where there is poison, or where the slot was not free
// in time; `epoch` is the block's.
DEVICE bool begin(const ProgramParameters& p, Staged& staged, std::uint32_t& epoch) {
  const std::uint32_t* const words = visible(p.words);
  const bool has_peer = thread() < p.members && thread() != p.me;
  if (thread() < p.members) staged.endings[thread()] = 0;
  const bool is_poisoned = load_relaxed(word_at(visible(p.mailboxes[p.me]), kPoisonAt)) != 0;
  epoch = chunk_of(load_relaxed(flag_of(p, p.me, p.me)));
  const std::uint32_t first_word = thread() < p.word_count ? words[thread()] : 0;
  const std::uint32_t seen = has_peer ? load_acquire(flag_of(p, p.me, thread())) : 0;
  for (std::uint32_t i = thread(); i < p.word_count; i += threads()) {
    const std::uint32_t word = i == thread() ? first_word : words[i];
    staged.words[i] = word;
    if (i < p.ref_count) staged.places[i] = place_of(p, word, block(), epoch);
  }
  if (is_poisoned) return false;
  const std::uint32_t free = mark_of(epoch - 1, 0);
  return !has_peer || has_come(seen, free) || has_come_in_time(p, staged, free, thread());
}

// One block's part of a launch: there is a chunk for each.
template <class Combine>
DEVICE void run_program(const ProgramParameters& p) {
  SHARED(Staged, staged);
  std::uint32_t epoch = 0;
  bool is_ready = begin(p, staged, epoch);
  for (std::uint32_t chunk = block();;) {
    if (barrier_or(!is_ready)) return poison_mailbox(p, staged);
    if (!run_chunk<Combine>(p, staged, chunk, epoch)) return poison_mailbox(p, staged);
    barrier();
    tell(p, ~std::uint64_t{0}, mark_of(++epoch, 0));
    chunk += blocks();
    if (chunk >= p.chunks) return;
    for (std::uint32_t i = thread(); i < p.ref_count; i += threads())
      staged.places[i] = place_of(p, staged.words[i], chunk, epoch);
    // Of a launch's first two chunks, who read the slot ran another program.
    const std::uint64_t readers = chunk < 2 * blocks() ? ~std::uint64_t{0} : p.readers;
    is_ready = thread() >= p.members || thread() == p.me || (readers >> thread() & 1) == 0 ||
               has_come_in_time(p, staged, mark_of(epoch - 1, 0), thread());
  }
}

KERNEL(program_move, ProgramParameters) { run_program<Moving>(p); }

#define PROGRAM(name, kType, op, kOp, Codec, ...)          \
  static_assert(fits<Dtype::kType, ReduceOp::kOp, Codec>); \
  KERNEL(program_##name##_##op, ProgramParameters) {       \
    run_program<Combining<Codec, __VA_ARGS__>>(p);         \
  }

EACH_REDUCTION(PROGRAM)

}  // namespace pycollective::cuda
