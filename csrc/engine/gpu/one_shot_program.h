// One-shot, as a program: each rank hands over all of its input, and combines all inputs by itself.
#pragma once

#include <memory>

#include "engine/plans/program.h"

namespace pycollective {

// For `kind` an all-reduce, or a reduce to `root`, among the ranks of one host: one wait, where the
// schedules' "direct", which cuts the buffer into shards, has two. (Of what is given in shards, and
// of what only moves, "direct" has one wait already.)
std::shared_ptr<const Program> make_one_shot(OpKind kind, int root, int rank, int ranks);

}  // namespace pycollective
