// A litmus loop for weak memory: two ranks hand over small payloads by the library's own protocol
// (cuda/program.cu), again and again, and count what was not theirs to see.
//
// Each exchange, block b of each: waits until the other has read what is in the slot; all threads
// write the exchange's number into it by plain stores, and meet; one thread tells, with release;
// one waits for the other's mark, with acquire; all meet, and read the other's slot by plain loads;
// they meet, and one tells that all have read.
#include "litmus_parameters.h"

#include "cuda/device.h"

namespace pycollective::cuda {

// What device.h has not, since no kernel of the library may use it.
DEVICE void store_relaxed(std::uint32_t* word, std::uint32_t value) {
#if defined(PYCOLLECTIVE_CUDA_EMULATION)
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
  emulated::has_published();
#else
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#endif
}

constexpr int kLinger = 256;  // pauses between a mark that is too early and what it speaks of

DEVICE void linger() {
  for (int i = 0; i < kLinger; ++i) pause();
}

DEVICE void tell(std::uint32_t* flag, std::uint32_t mark, Flags flags) {
  if (thread() != 0) return;
  if (flags == Flags::kRelaxed)
    store_relaxed(flag, mark);
  else
    store_release(flag, mark);
}

DEVICE bool is_there(const std::uint32_t* flag, std::uint32_t mark, Flags flags) {
  return has_come(flags == Flags::kRelaxed ? load_relaxed(flag) : load_acquire(flag), mark);
}

// For all threads of the block; false where it was not in time.
DEVICE bool await(const std::uint32_t* flag, std::uint32_t mark, const LitmusParameters& p) {
  bool late = false;
  if (thread() == 0) {
    const std::uint64_t begin = nanoseconds();
    while (!is_there(flag, mark, p.flags)) {
      pause();
      if ((late = nanoseconds() - begin > p.nanoseconds)) break;
    }
  }
  return !barrier_or(late);
}

KERNEL(litmus_exchange, LitmusParameters) {
  char* const mine = static_cast<char*>(visible(p.mine));
  char* const other = static_cast<char*>(visible(p.other));
  const auto* const flag = reinterpret_cast<const std::uint32_t*>(mine + kLitmusLine * block());
  auto* const others = reinterpret_cast<std::uint32_t*>(other + kLitmusLine * block());
  LitmusCount count{};
  for (std::uint32_t i = 0; i < p.exchanges; ++i) {
    const std::uint32_t epoch = p.first + i, number = epoch + 1;
    const std::uint64_t at = litmus_slot_at(blocks(), block(), p.slots, epoch % p.slots, p.words);
    auto* const out = reinterpret_cast<std::uint32_t*>(mine + at);
    const auto* const in = reinterpret_cast<const std::uint32_t*>(other + at);

    bool in_time = await(flag, mark_of(epoch + 1 - p.slots, 0), p);
    if (in_time) {
      if (p.flags == Flags::kEarly) {
        tell(others, mark_of(epoch, 1), p.flags);
        if (p.lingers) linger();
      }
      for (std::uint32_t w = thread(); w < p.words; w += threads()) out[w] = number;
      barrier();
      if (p.flags != Flags::kEarly) tell(others, mark_of(epoch, 1), p.flags);
      in_time = await(flag, mark_of(epoch, 1), p);
    }
    if (!in_time) {
      if (thread() == 0) ++count.late;
      break;
    }
    if (p.flags == Flags::kEarlyDone) {
      tell(others, mark_of(epoch + 1, 0), p.flags);
      if (p.lingers) linger();
    }
    for (std::uint32_t w = thread(); w < p.words; w += threads()) {
      const auto ahead = static_cast<std::int32_t>(in[w] - number);
      if (ahead < 0) ++count.stale;
      if (ahead > 0) ++count.overwritten;
    }
    barrier();
    if (p.flags != Flags::kEarlyDone) tell(others, mark_of(epoch + 1, 0), p.flags);
    if (thread() == 0) ++count.exchanges;
  }
  LitmusCount& sum = visible(p.counts)[block() * threads() + thread()];
  sum.stale += count.stale;
  sum.overwritten += count.overwritten;
  sum.late += count.late;
  sum.exchanges += count.exchanges;
}

}  // namespace pycollective::cuda
