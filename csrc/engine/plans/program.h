// The execution plan of one rank, made of a schedule: what the engine carries out, chunk by chunk.
//
// Each rank lays out a slot of its data area alike: places for nodes, then places for items, which
// are leaves and results in the stored type. What a rank sends on its host it puts into a place of
// its own slot and then publishes. Events are counted in the order of publishing, so one number a
// slot tells how far a rank has come. A rank that needs something waits for its event and reads it
// where it lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/api.h"
#include "shared_memory/layout.h"

namespace pycollective {

enum class Place : std::uint8_t { kInput, kOutput, kNode, kItem };

// Ranks of other hosts send messages instead, each with the pieces that go from one rank to another
// in one step. A message of one piece goes straight from where it lies to where it belongs.

// A piece of memory of each chunk: of the caller's buffers, or in a slot of `member`.
struct Ref {
  Place place;
  Member member;       // whose slot
  std::int32_t shard;  // which elements
  std::int32_t index;  // of the place in the slot; of the row, where the input is dealt nodes
};

struct Instruction {
  enum class Kind : std::uint8_t {
    kWait,     // until member `a` has published `b` events in this chunk
    kCopy,     // ref a to ref b
    kCombine,  // combination a into ref b, and ref c unless it is -1
    kPublish,  // `a` events
    kPost,     // make ready to receive message a
    kReceive,  // until message a is there
    kSend,     // message a
    kSettle,   // until the first `a` messages sent in this chunk have left their memory
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

struct Message {
  std::int32_t rank;         // of the other side, as the communicator counts
  std::int32_t step;         // of the schedule; from one rank to another one message a step
  std::int32_t first_piece;  // of `message_pieces`
  std::int32_t pieces;
};

// Immutable; shared by all calls of one kind.
struct Program {
  std::string algorithm;
  OpKind kind = OpKind::kBarrier;
  int root = 0;
  int rank = 0;            // whose program it is
  int ranks = 0;           // of the communicator
  int members = 0;         // of the group on this host
  std::int32_t steps = 0;  // of the schedule, on all ranks
  Pieces pieces = Pieces::kCut;
  std::int32_t shards = 0;
  std::int32_t leaves = 0;  // that were dealt to the ranks; 0: each rank's input is one leaf
  std::int32_t rows = 0;    // of this rank: the nodes that make up its leaves
  std::uint64_t deal = 0;   // the deal's digest
  std::int32_t nodes = 0;   // places of each kind in a slot: the most that any rank needs
  std::int32_t items = 0;
  std::vector<Ref> refs;
  std::vector<Instruction> instructions;
  std::vector<CombineStep> combines;
  std::vector<std::int32_t> terms;  // refs
  std::vector<std::uint8_t> recipes;
  std::vector<Member> readers;  // who reads this rank's slots
  std::vector<Message> messages;
  std::vector<std::int32_t> message_pieces;  // refs
  std::vector<std::int32_t> peers;  // ranks of other hosts that this one exchanges messages with

  // Throws std::invalid_argument unless this is sure: whatever the peers do, a rank that carries it
  // out reads its own input and output and the slots of its group, writes its output and its own
  // slots, and nothing beyond; and no message outlives its chunk. It is no proof that the result is
  // right, nor that nobody waits for ever: that is pycollective/schedule/proof.py's.
  void check(Member me) const;
  // Whether what lies there is a node, in the accumulator's type.
  bool is_node(const Ref& ref) const {
    return ref.place == Place::kNode || (ref.place == Place::kInput && leaves != 0);
  }
  // Whether it is for this request: otherwise what check() proved does not hold.
  bool serves(const Request& request) const;
};

// Longest name of an algorithm: it travels with the call, so that a mismatch can name it.
constexpr std::size_t kAlgorithmName = 19;

}  // namespace pycollective
