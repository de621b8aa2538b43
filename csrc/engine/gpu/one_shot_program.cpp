#include "engine/gpu/one_shot_program.h"

#include <stdexcept>

#include "kernels/kernels.h"

namespace pycollective {
namespace {

using Kind = Instruction::Kind;

// The recipe that adds leaves [0, n) in the contract's order, postfix.
void append_recipe(std::vector<std::uint8_t>& recipe, int n) {
  if (n == 1) {
    recipe.push_back(kRecipeTake);
    return;
  }
  int middle = 1;
  while (2 * middle < n) middle *= 2;
  append_recipe(recipe, middle);
  append_recipe(recipe, n - middle);
  recipe.push_back(kRecipeCombine);
}

}  // namespace

std::shared_ptr<const Program> make_one_shot(OpKind kind, int root, int rank, int ranks) {
  if (kind != OpKind::kAllReduce && kind != OpKind::kReduce)
    throw std::invalid_argument(std::string("there is no one-shot ") + name_of(kind));
  auto made = std::make_shared<Program>();
  Program& p = *made;
  p.algorithm = "one_shot";
  p.kind = kind;
  p.root = root;
  p.rank = rank;
  p.ranks = p.members = ranks;
  p.pieces = Pieces::kCut;
  p.shards = p.items = 1;
  const bool combines = kind == OpKind::kAllReduce || rank == root;
  const auto add_ref = [&p](Place place, int member) {
    p.refs.push_back({place, Member(member), 0, 0});
    return static_cast<std::int32_t>(p.refs.size()) - 1;
  };
  const std::int32_t input = add_ref(Place::kInput, rank);
  for (int other = 0; other < ranks; ++other)
    if (other != rank && (kind == OpKind::kAllReduce || other == root))
      p.readers.emplace_back(other);
  if (!p.readers.empty()) {
    p.instructions.push_back({Kind::kCopy, input, add_ref(Place::kItem, rank), 0});
    p.instructions.push_back({Kind::kPublish, 1, 0, 0});
  }
  if (combines) {
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) p.instructions.push_back({Kind::kWait, other, 1, 0});
      p.terms.push_back(other == rank ? input : add_ref(Place::kItem, other));
    }
    append_recipe(p.recipes, ranks);
    p.combines.push_back({0, ranks, 0, static_cast<std::int32_t>(p.recipes.size()), true});
    p.instructions.push_back({Kind::kCombine, 0, add_ref(Place::kOutput, rank), -1});
  }
  p.check(Member(rank));
  return made;
}

}  // namespace pycollective
