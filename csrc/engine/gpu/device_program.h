// Execution plans for kernels: in the words that they interpret (cuda/program_parameters.h), and
// one that only they have.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/program_parameters.h"
#include "engine/plans/program.h"

namespace pycollective {

struct DeviceProgram {
  std::vector<std::uint32_t> words;  // refs, then instructions
  std::uint32_t ref_count = 0;
  std::uint64_t readers = 0;  // mask
};

// Throws std::invalid_argument for a plan that kernels cannot interpret, and says why: it has
// messages between hosts, or more than fits a block.
DeviceProgram lower_for_device(const Program& program, Member me);

// One-shot as a plan: each rank shares all of its input, and combines all inputs by itself.
// For an all-reduce, or a reduce to `root`, among the ranks of one host. It has one wait, where
// "direct", which cuts the buffer into shards, has two. (For operations on shards, and those that
// only move bytes, "direct" has one wait already.)
std::shared_ptr<const Program> make_one_shot(OpKind kind, int root, int rank, int ranks);

}  // namespace pycollective
