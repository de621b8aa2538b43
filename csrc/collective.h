// What each operation is: which buffers there are, on which ranks, and how much they hold. The one
// table; all else, here and in Python (`_core.operations()`), is read from it.
#pragma once

#include <cstdint>

namespace pycollective {

enum class OpKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kReduce,
  kBroadcast,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kBarrier,
};
constexpr int kOpKinds = 11;

// How much a buffer holds: `count` elements, or one shard, or the shards of all ranks.
enum class Holds : std::uint8_t { kNothing, kVector, kShard, kAllShards };
enum class Who : std::uint8_t { kAll, kRoot, kAllButRoot };

// What a schedule's shards are pieces of.
enum class Pieces : std::uint8_t {
  kCut,    // one vector, cut as equal as whole cache lines allow
  kRanks,  // one shard a rank, equal or by counts
  kPairs,  // one shard for each pair of ranks, number source * n + target
};

struct Buffer {
  Holds holds;
  Who who;  // which ranks have it
};

struct OperationTraits {
  OpKind kind;
  const char* name;
  Buffer input;
  Buffer output;
  Pieces pieces;
  bool reduces;  // computes; otherwise only moves bytes
  bool rooted;   // all ranks name one root
  bool pair;     // between two ranks: the root of a request is the peer
};

constexpr Buffer kNone = {Holds::kNothing, Who::kAll};
constexpr Buffer kVector = {Holds::kVector, Who::kAll};
constexpr Buffer kShard = {Holds::kShard, Who::kAll};
constexpr Buffer kAllShards = {Holds::kAllShards, Who::kAll};
constexpr Buffer kRootsVector = {Holds::kVector, Who::kRoot};
constexpr Buffer kOthersVector = {Holds::kVector, Who::kAllButRoot};
constexpr Buffer kRootsShards = {Holds::kAllShards, Who::kRoot};

// clang-format off: a table                                                                      reduces rooted pair
constexpr OperationTraits kOperationTable[kOpKinds] = {
    {OpKind::kAllReduce,     "all_reduce",     kVector,      kVector,       Pieces::kCut,   true,  false, false},
    {OpKind::kReduceScatter, "reduce_scatter", kAllShards,   kShard,        Pieces::kRanks, true,  false, false},
    {OpKind::kAllGather,     "all_gather",     kShard,       kAllShards,    Pieces::kRanks, false, false, false},
    {OpKind::kReduce,        "reduce",         kVector,      kRootsVector,  Pieces::kCut,   true,  true,  false},
    {OpKind::kBroadcast,     "broadcast",      kRootsVector, kOthersVector, Pieces::kCut,   false, true,  false},
    {OpKind::kAllToAll,      "all_to_all",     kAllShards,   kAllShards,    Pieces::kPairs, false, false, false},
    {OpKind::kGather,        "gather",         kShard,       kRootsShards,  Pieces::kRanks, false, true,  false},
    {OpKind::kScatter,       "scatter",        kRootsShards, kShard,        Pieces::kRanks, false, true,  false},
    {OpKind::kSend,          "send",           kVector,      kNone,         Pieces::kCut,   false, false, true},
    {OpKind::kRecv,          "recv",           kNone,        kVector,       Pieces::kCut,   false, false, true},
    {OpKind::kBarrier,       "barrier",        kNone,        kNone,         Pieces::kCut,   false, false, false},
};
// clang-format on

constexpr const OperationTraits& traits_of(OpKind kind) {
  return kOperationTable[static_cast<int>(kind)];
}
constexpr const char* name_of(OpKind kind) { return traits_of(kind).name; }
constexpr bool reduces(OpKind kind) { return traits_of(kind).reduces; }
constexpr bool is_pair(OpKind kind) { return traits_of(kind).pair; }

// Whether a rank has a buffer.
constexpr bool has(const Buffer& buffer, int rank, int root) {
  if (buffer.holds == Holds::kNothing) return false;
  return buffer.who == Who::kAll || (rank == root) == (buffer.who == Who::kRoot);
}

// Whether the count of a request is one shard's, rather than the whole buffer's.
constexpr bool in_shards(OpKind kind) { return traits_of(kind).pieces != Pieces::kCut; }
// Whether shards may be uneven, given by counts.
constexpr bool takes_counts(OpKind kind) { return traits_of(kind).pieces == Pieces::kRanks; }

// What moves on one host (engine/operations/one_shot.h, two_shot.h), where nothing is computed:
// what one rank has goes to all who want it, or a part of what it has to each.
constexpr bool only_shares(OpKind kind) {
  const OperationTraits& traits = traits_of(kind);
  return !traits.reduces && traits.input.holds != Holds::kAllShards;
}
constexpr bool only_exchanges(OpKind kind) {
  const OperationTraits& traits = traits_of(kind);
  return !traits.reduces && traits.input.holds == Holds::kAllShards;
}

namespace checks {
constexpr bool operations_are_in_order() {
  for (int i = 0; i < kOpKinds; ++i)
    if (static_cast<int>(kOperationTable[i].kind) != i) return false;
  return true;
}
static_assert(operations_are_in_order());
}  // namespace checks

}  // namespace pycollective
