// Kernels of the stand-in's own tests: a copy, and what kernels must not do.
#include "test_kernels.h"

#include "emulation.h"

namespace pycollective::cuda {

KERNEL(test_copy, testing::Copy) {
  const std::uint32_t* const from = visible(p.from);
  std::uint32_t* const to = visible(p.to);
  for (std::size_t i = thread(); i < p.words; i += threads()) to[i] = from[i];
}

// Waits until the word, in host memory, is the value.
KERNEL(test_wait, testing::Wait) {
  const std::uint32_t* const word = visible(p.word);
  std::uint32_t* const blocks = visible(p.blocks);
  if (blocks && thread() == 0) __atomic_fetch_add(blocks, 1u, __ATOMIC_ACQ_REL);
  while (load_acquire(word) != p.value) pause();
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
