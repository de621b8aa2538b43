// Where the shards of a program lie in the caller's buffers.
#pragma once

#include "engine/operations/shards.h"
#include "engine/plans/program.h"

namespace pycollective {

// A broadcast's root has its output already: where its input is.
inline void* output_of(const Request& request, int rank) {
  const bool is_there = traits_of(request.kind).output.who == Who::kAllButRoot;
  return is_there && rank == request.root ? const_cast<void*>(request.input) : request.output;
}

inline Shards shards_of(const Request& request, const Program& program) {
  if (program.pieces == Pieces::kCut)
    return Shards::cut(request.count, program.shards, request.dtype);
  return Shards(request, program.ranks);  // pairs are of equal size, one shard's
}

constexpr int kBeginsAtZero = -1;

// The shard of Shards where a program's shard begins in the caller's input or output.
inline int begin_of(const Program& program, Place place, std::int32_t shard) {
  const OperationTraits& traits = traits_of(program.kind);
  const bool input = place == Place::kInput;
  if ((input ? traits.input : traits.output).holds == Holds::kShard) return kBeginsAtZero;
  if (traits.pieces != Pieces::kPairs) return shard;
  return input ? shard % program.ranks : shard / program.ranks;
}

}  // namespace pycollective
