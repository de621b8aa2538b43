// Kernels of the stand-in's own tests: what the sources in csrc/cuda use of device.h, and what
// they must not do.
#include "test_kernels.h"

#include "emulation.h"

namespace pycollective::cuda {

// to = from, by 16 bytes.
KERNEL(test_copy, testing::Copy) {
  struct alignas(16) Quad {
    std::uint32_t words[4];
  };
  const auto* const from = reinterpret_cast<const Quad*>(visible(p.from));
  auto* const to = reinterpret_cast<Quad*>(visible(p.to));
  for (std::size_t i = block() * threads() + thread(); i < p.words / 4; i += blocks() * threads())
    to[i] = from[i];
}

// Adds up by blocks, in shared memory: to[block] is the sum of the block's part.
KERNEL(test_sum, testing::Copy) {
  const std::uint32_t* const from = visible(p.from);
  std::uint32_t* const to = visible(p.to);
  SHARED(std::uint32_t[kMostThreads], sums);
  sums[thread()] = 0;
  for (std::size_t i = block() * threads() + thread(); i < p.words; i += blocks() * threads())
    sums[thread()] += from[i];
  for (unsigned half = threads() / 2; half > 0; half /= 2) {
    barrier();
    if (thread() < half) sums[thread()] += sums[thread() + half];
  }
  if (thread() == 0) to[block()] = sums[0];
}

// The same without a barrier before the last additions.
KERNEL(test_sum_racing, testing::Copy) {
  std::uint32_t* const to = visible(p.to);
  SHARED(std::uint32_t[kMostThreads], sums);
  sums[thread()] = thread();
  if (thread() == 0)
    for (unsigned i = 1; i < threads(); ++i) sums[0] += sums[i];
  if (thread() == 0) to[block()] = sums[0];
}

// Publishes `value` in `own` after writing `data`; waits for it in `other`; copies peer's data.
// Ends by the deadline, or by the abort word, with 1 or 2 in `ended`.
KERNEL(test_exchange, testing::Exchange) {
  std::uint32_t* const data = visible(p.data);
  const std::uint32_t* const peer_data = visible(p.peer_data);
  std::uint32_t* const own = visible(p.own);
  const std::uint32_t* const other = visible(p.other);
  const std::uint32_t* const abort = visible(p.abort);
  std::uint32_t* const got = visible(p.got);
  std::uint32_t* const ended = visible(p.ended);
  using testing::Fault;
  if (p.fault == Fault::kFlagBeforeData && thread() == 0) store_release(own, p.value);
  if (p.words > thread()) data[thread()] = p.value + thread();
  barrier();
  if (p.fault == Fault::kRelaxedFlag && thread() == 0)
    __atomic_store_n(own, p.value, __ATOMIC_RELAXED);
  if (p.fault == Fault::kNone && thread() == 0) store_release(own, p.value);
  const std::uint64_t until = nanoseconds() + p.nanoseconds;
  bool late = false, aborted = false;
  if (thread() == 0)
    while (load_acquire(other) != p.value) {
      if ((late = nanoseconds() > until)) break;
      if (abort && (aborted = load_relaxed(abort) != 0)) break;
      pause();
    }
  if (barrier_or(late || aborted)) {
    if (thread() == 0) *ended = late ? 1 : 2;
    return;
  }
  if (p.words > thread()) got[thread()] = peer_data[thread()];
  if (thread() == 0) *ended = 0;
}

// Waits until the word, in host memory, is the value.
KERNEL(test_wait, testing::Wait) {
  const std::uint32_t* const word = visible(p.word);
  std::uint32_t* const blocks = visible(p.blocks);
  if (blocks && thread() == 0) __atomic_fetch_add(blocks, 1u, __ATOMIC_ACQ_REL);
  while (load_acquire(word) != p.value) pause();
}

// Writes which thread came when.
KERNEL(test_order, testing::Copy) {
  std::uint32_t* const to = visible(p.to);
  pause();
  to[1 + __atomic_fetch_add(to, 1u, __ATOMIC_ACQ_REL)] = thread();
}

KERNEL(test_one_leaves, testing::Copy) {
  if (thread() != 3) barrier();
}

KERNEL(test_two_barriers, testing::Copy) {
  if (thread() % 2)
    barrier();
  else
    barrier_or(true);
}

KERNEL(test_writes_past, testing::Copy) {
  if (thread() == 0) visible(p.to)[p.words] = 1;
}

}  // namespace pycollective::cuda
