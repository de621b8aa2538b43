// One-shot as a plan: each rank shares all of its input, and combines all inputs by itself.
#pragma once

#include <memory>

#include "engine/plans/program.h"

namespace pycollective {

// For an all-reduce, or a reduce to `root`, among the ranks of one host. It has one wait, where
// "direct", which cuts the buffer into shards, has two. (For operations on shards, and those that
// only move bytes, "direct" has one wait already.)
std::shared_ptr<const Program> make_one_shot(OpKind kind, int root, int rank, int ranks);

}  // namespace pycollective
