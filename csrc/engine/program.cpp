#include "engine/program.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/kernels.h"
#include "transport/layout.h"

namespace pycollective {
namespace {

constexpr int kMostPending = 16;               // of a recipe; see kernels/combine.h
constexpr std::int32_t kMostEvents = 1 << 20;  // of a chunk; see engine/scheduled.cpp

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("a schedule's program is broken: ") + what);
}

bool within(std::int64_t number, std::size_t end) {
  return number >= 0 && static_cast<std::size_t>(number) < end;
}

void check_recipe(const std::uint8_t* recipe, int length, int terms) {
  int taken = 0;
  int waiting = 0;
  for (int k = 0; k < length; ++k) {
    if (recipe[k] == kRecipeTake) {
      ++taken;
      ++waiting;
    } else {
      --waiting;
    }
    require(waiting >= 1 && waiting <= kMostPending, "a recipe's stack");
  }
  require(waiting == 1 && taken == terms, "a recipe's operands");
}

}  // namespace

void Program::check(Member me) const {
  const auto is_member = [&](std::int32_t number) {
    return within(number, static_cast<std::size_t>(members));
  };
  require(ranks >= 1 && ranks <= kMaxRanks, "ranks");
  require(members >= 1 && members <= ranks && members <= kMaxMembers && is_member(me.index()),
          "members");
  require(root >= 0 && root < ranks, "root");
  require(shards >= 1 && nodes >= 0 && items >= 0, "shards");
  require(pieces != Pieces::kRanks || shards == ranks, "shards of ranks");
  require(pieces != Pieces::kPairs || shards == ranks * ranks, "shards of pairs");
  require(!algorithm.empty() && algorithm.size() <= kAlgorithmName, "name");
  for (const Ref& ref : refs) {
    require(within(ref.shard, static_cast<std::size_t>(shards)), "a shard");
    require(is_member(ref.member.index()), "a member");
    if (ref.place == Place::kNode) require(within(ref.index, std::size_t(nodes)), "a node");
    if (ref.place == Place::kItem) require(within(ref.index, std::size_t(items)), "an item");
  }
  const auto written = [&](std::int32_t ref) {
    require(within(ref, refs.size()), "a ref");
    const Ref& to = refs[static_cast<std::size_t>(ref)];
    require(to.place != Place::kInput && (to.place == Place::kOutput || to.member == me),
            "what is written");
  };
  const auto message = [&](std::int32_t number) -> const Message& {
    require(within(number, messages.size()), "a message");
    return messages[static_cast<std::size_t>(number)];
  };
  const auto received = [&](const Message& each) {
    for (std::int32_t p = 0; p < each.pieces; ++p)
      written(message_pieces[static_cast<std::size_t>(each.first_piece + p)]);
  };
  for (const Message& each : messages) {
    require(within(each.rank, static_cast<std::size_t>(ranks)), "a message's rank");
    require(std::find(far.begin(), far.end(), each.rank) != far.end(), "a message's rank");
    require(within(each.tag, static_cast<std::size_t>(tags)), "a tag");
    require(each.pieces >= 1 && within(each.first_piece, message_pieces.size()) &&
                std::size_t(each.first_piece) + std::size_t(each.pieces) <= message_pieces.size(),
            "pieces");
  }
  for (const std::int32_t piece : message_pieces) require(within(piece, refs.size()), "a piece");
  std::int64_t events = 0;
  std::int64_t sends = 0;
  for (const Instruction& each : instructions) {
    switch (each.kind) {
      case Instruction::Kind::kWait:
        require(is_member(each.a) && Member(each.a) != me, "a wait");
        require(each.b >= 1 && each.b < kMostEvents, "a number of events");
        break;
      case Instruction::Kind::kCopy:
        require(within(each.a, refs.size()), "a ref");
        written(each.b);
        break;
      case Instruction::Kind::kCombine:
        require(within(each.a, combines.size()), "a combination");
        written(each.b);
        if (each.c != -1) written(each.c);
        break;
      case Instruction::Kind::kPublish:
        require(each.a >= 1 && (events += each.a) < kMostEvents, "a number of events");
        break;
      case Instruction::Kind::kPost:
      case Instruction::Kind::kReceive:
        received(message(each.a));
        break;
      case Instruction::Kind::kSend:
        message(each.a);
        ++sends;
        break;
      case Instruction::Kind::kSettle:
        require(each.a >= 0 && each.a <= sends, "a number of sends");
        break;
    }
  }
  for (const CombineStep& each : combines) {
    require(each.terms >= 1 && within(each.first_term, terms.size()) &&
                std::size_t(each.first_term) + std::size_t(each.terms) <= terms.size(),
            "terms");
    require(each.recipe_length >= 1 && within(each.first_recipe, recipes.size()) &&
                std::size_t(each.first_recipe) + std::size_t(each.recipe_length) <= recipes.size(),
            "a recipe");
    check_recipe(recipes.data() + each.first_recipe, each.recipe_length, each.terms);
  }
  for (const std::int32_t term : terms) require(within(term, refs.size()), "a term");
  for (const Member reader : readers)
    require(is_member(reader.index()) && reader != me, "a reader");
}

}  // namespace pycollective
