// A schedule, lowered and assembled for one rank: what the engine carries out, chunk by chunk.
//
// Each rank lays out a slot of its data area alike: places for nodes, then places for items, which
// are leaves and results in the stored type. What a rank hands over it puts into a place of its own
// slot and then publishes; events are counted in the order of publishing, so one number a slot
// tells how far a rank has come. Who needs something waits for its event and reads it where it
// lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace pycollective {

enum class Place : std::uint8_t { kInput, kOutput, kNode, kItem };

// A piece of memory of each chunk: of the caller's buffers, or in a slot of `rank`.
struct Ref {
  Place place;
  std::int32_t rank;   // whose slot
  std::int32_t shard;  // which elements
  std::int32_t index;  // of the place in the slot
};

struct Instruction {
  enum class Kind : std::uint8_t {
    kWait,     // until rank `a` has published `b` events in this chunk
    kCopy,     // ref a to ref b
    kCombine,  // combination a into ref b, and ref c unless it is -1
    kPublish,  // `a` events
  };
  Kind kind;
  std::int32_t a;
  std::int32_t b;
  std::int32_t c;
};

struct CombineStep {
  std::int32_t first_term;  // of `terms`
  std::int32_t terms;
  std::int32_t first_recipe;  // of `recipes`
  std::int32_t recipe_length;
  bool finish;
};

enum class Pieces : std::uint8_t {
  kCut,    // shards of one vector, as equal as whole cache lines allow
  kRanks,  // one shard a rank, equal or by counts
  kPairs,  // one shard for each pair of ranks, number source * n + target
};

// Immutable; shared by all calls of one kind.
struct Program {
  std::string algorithm;
  OpKind kind = OpKind::kBarrier;
  int root = 0;
  int ranks = 0;
  Pieces pieces = Pieces::kCut;
  std::int32_t shards = 0;
  std::int32_t nodes = 0;  // places of each kind in a slot: the most that any rank needs
  std::int32_t items = 0;
  std::vector<Ref> refs;
  std::vector<Instruction> instructions;
  std::vector<CombineStep> combines;
  std::vector<std::int32_t> terms;  // refs
  std::vector<std::uint8_t> recipes;
  std::vector<std::int32_t> readers;  // ranks that read this rank's slots

  // Throws std::invalid_argument where a number leads outside, so that no schedule can make the
  // engine touch what is not its own.
  void check(int rank) const;
};

// Longest name of an algorithm: it travels with the call, so that a mismatch can name it.
constexpr std::size_t kAlgorithmName = 23;

}  // namespace pycollective
