#include "engine/plans/program.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/kernels.h"

namespace pycollective {
namespace {

constexpr int kMostPending = 16;               // of a recipe; see kernels/combine.inl
constexpr std::int32_t kMostEvents = 1 << 20;  // of a chunk; see engine/operations/scheduled.cpp
constexpr std::int32_t kMostSteps = 1 << 24;   // so that three slots' worth is a number

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("a schedule's program is broken: ") + what);
}

bool within(std::int64_t number, std::size_t end) {
  return number >= 0 && static_cast<std::size_t>(number) < end;
}

bool is_slice(std::int32_t first, std::int32_t length, std::size_t end) {
  return length >= 1 && within(first, end) && std::size_t(first) + std::size_t(length) <= end;
}

void check_recipe(const std::uint8_t* recipe, int length, int terms) {
  int taken = 0;
  int waiting = 0;
  for (int k = 0; k < length; ++k) {
    require(recipe[k] == kRecipeTake || recipe[k] == kRecipeCombine, "a recipe's step");
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

class Checker {
 public:
  Checker(const Program& program, Member me)
      : p_(program), me_(me), traits_(known(program.kind)), used_(program.messages.size()) {}

  void check() {
    check_numbers();
    for (const Ref& ref : p_.refs) check_ref(ref);
    check_messages();
    for (const CombineStep& each : p_.combines) check_combine(each);
    for (const Instruction& each : p_.instructions) check_instruction(each);
    require(std::count(used_.begin(), used_.end(), Use::kPosted) == 0, "a message that is lost");
  }

 private:
  enum class Use : std::uint8_t { kNone, kPosted, kDone };

  static const OperationTraits& known(OpKind kind) {
    require(static_cast<int>(kind) < kOpKinds, "operation");
    return traits_of(kind);
  }
  bool between_hosts() const { return p_.members != p_.ranks; }
  bool is_member(std::int32_t number) const { return within(number, std::size_t(p_.members)); }
  bool is_rank(std::int32_t number) const { return within(number, std::size_t(p_.ranks)); }

  void check_numbers() const {
    require(!traits_.pair, "operation");
    require(p_.ranks >= 1 && p_.ranks <= kCountableRanks, "ranks");
    require(is_rank(p_.rank) && is_rank(p_.root), "rank or root");
    require(p_.members >= 1 && p_.members <= p_.ranks && p_.members <= kMaxMembers, "members");
    require(is_member(me_.index()) && (between_hosts() || me_.index() == p_.rank), "member");
    require(p_.nodes >= 0 && p_.items >= 0 && p_.steps >= 0 && p_.steps <= kMostSteps, "places");
    require(p_.pieces == traits_.pieces, "pieces");
    const std::int32_t n = p_.ranks;
    require(p_.pieces == Pieces::kCut ? p_.shards >= 1 && p_.shards <= kCountableRanks
                                      : p_.shards == (p_.pieces == Pieces::kPairs ? n * n : n),
            "shards");
    require(p_.leaves >= 0 && p_.leaves <= kCountableRanks && (p_.leaves == 0 || traits_.reduces),
            "leaves");
    require(p_.rows >= 0 && p_.rows <= p_.leaves, "rows");
    require(!p_.algorithm.empty() && p_.algorithm.size() <= kAlgorithmName, "name");
    for (const Member reader : p_.readers)
      require(is_member(reader.index()) && reader != me_, "a reader");
  }

  // Whether this rank's input or output has a shard.
  bool has_shard(const Buffer& buffer, bool input, std::int32_t shard) const {
    if (!has(buffer, p_.rank, p_.root)) return false;
    if (buffer.holds == Holds::kShard) return shard == p_.rank;
    if (p_.pieces == Pieces::kPairs)
      return (input ? shard / p_.ranks : shard % p_.ranks) == p_.rank;
    return true;
  }
  // A broadcast's root, whose output is its input: to be read, or copied onto itself.
  bool output_is_input() const {
    return traits_.output.who == Who::kAllButRoot && p_.rank == p_.root;
  }

  void check_ref(const Ref& ref) const {
    require(within(ref.shard, std::size_t(p_.shards)), "a shard");
    require(is_member(ref.member.index()), "a member");
    switch (ref.place) {
      case Place::kInput:
        require(ref.member == me_ && has_shard(traits_.input, true, ref.shard), "an input");
        require(p_.leaves == 0 || within(ref.index, std::size_t(p_.rows)), "a row");
        break;
      case Place::kOutput:
        require(
            ref.member == me_ && (output_is_input() || has_shard(traits_.output, false, ref.shard)),
            "an output");
        break;
      case Place::kNode:
        require(traits_.reduces && within(ref.index, std::size_t(p_.nodes)), "a node");
        break;
      case Place::kItem:
        require(within(ref.index, std::size_t(p_.items)), "an item");
        break;
      default:
        require(false, "a place");
    }
  }

  const Ref& ref(std::int32_t number) const {
    require(within(number, p_.refs.size()), "a ref");
    return p_.refs[static_cast<std::size_t>(number)];
  }
  const Ref& written(std::int32_t number) const {
    const Ref& to = ref(number);
    require(to.place != Place::kInput && to.member == me_, "what is written");
    require(to.place != Place::kOutput || !output_is_input(), "an output that is the input");
    return to;
  }
  static bool same(const Ref& a, const Ref& b) {
    const bool in_slot = a.place == Place::kNode || a.place == Place::kItem;
    return a.place == b.place && a.member == b.member &&
           (in_slot ? a.index == b.index : a.shard == b.shard);
  }

  void check_messages() const {
    require(between_hosts() || (p_.messages.empty() && p_.peers.empty()), "messages on one host");
    for (std::size_t i = 0; i < p_.peers.size(); ++i)
      require(is_rank(p_.peers[i]) && p_.peers[i] != p_.rank &&
                  (i == 0 || p_.peers[i - 1] < p_.peers[i]),
              "a rank of another host");
    for (const std::int32_t piece : p_.message_pieces) ref(piece);
    for (const Message& each : p_.messages) {
      require(std::binary_search(p_.peers.begin(), p_.peers.end(), each.rank), "a message's rank");
      require(within(each.step, std::size_t(p_.steps)), "a step");
      require(is_slice(each.first_piece, each.pieces, p_.message_pieces.size()), "pieces");
    }
  }

  void check_combine(const CombineStep& each) const {
    require(traits_.reduces, "a combination");
    // Operands ascend, and each has a leaf of its own.
    require(each.terms <= std::max(p_.ranks, p_.leaves) &&
                is_slice(each.first_term, each.terms, p_.terms.size()),
            "terms");
    require(is_slice(each.first_recipe, each.recipe_length, p_.recipes.size()), "a recipe");
    check_recipe(p_.recipes.data() + each.first_recipe, each.recipe_length, each.terms);
    for (std::int32_t t = 0; t < each.terms; ++t)
      ref(p_.terms[static_cast<std::size_t>(each.first_term + t)]);
  }

  void check_copy(const Instruction& each) const {
    const Ref& from = ref(each.a);
    const Ref& to = ref(each.b);
    // Onto itself: the one thing that may be "written" there.
    const bool nothing = output_is_input() && from.place == Place::kInput &&
                         to.place == Place::kOutput && from.shard == to.shard;
    if (!nothing) written(each.b);
    require(from.shard == to.shard, "a copy's shards");
    require(p_.is_node(from) == p_.is_node(to), "a copy's types");
  }

  void check_combining(const Instruction& each) const {
    require(within(each.a, p_.combines.size()), "a combination");
    const CombineStep& step = p_.combines[static_cast<std::size_t>(each.a)];
    const Ref& out = written(each.b);
    require((out.place == Place::kNode) != step.finish, "a combination's type");
    for (std::int32_t t = 0; t < step.terms; ++t) {
      const Ref& term = ref(p_.terms[static_cast<std::size_t>(step.first_term + t)]);
      require(term.shard == out.shard, "a combination's shards");
    }
    if (each.c == -1) return;
    const Ref& copy = written(each.c);
    require(
        copy.shard == out.shard && (copy.place == Place::kNode) != step.finish && !same(copy, out),
        "a combination's copy");
  }

  // A message goes one way, once in a chunk; what is posted is received.
  void use(std::int32_t number, Use from, Use to) {
    require(within(number, used_.size()), "a message");
    Use& now = used_[static_cast<std::size_t>(number)];
    require(now == from, "a message's turn");
    now = to;
  }

  void check_instruction(const Instruction& each) {
    switch (each.kind) {
      case Instruction::Kind::kWait:
        require(is_member(each.a) && Member(each.a) != me_, "a wait");
        require(each.b >= 1 && each.b < kMostEvents, "a number of events");
        break;
      case Instruction::Kind::kCopy:
        check_copy(each);
        break;
      case Instruction::Kind::kCombine:
        check_combining(each);
        break;
      case Instruction::Kind::kPublish:
        require(each.a >= 1 && (events_ += each.a) < kMostEvents, "a number of events");
        break;
      case Instruction::Kind::kPost: {
        use(each.a, Use::kNone, Use::kPosted);
        const Message& message = p_.messages[static_cast<std::size_t>(each.a)];
        for (std::int32_t piece = 0; piece < message.pieces; ++piece)
          written(p_.message_pieces[static_cast<std::size_t>(message.first_piece + piece)]);
        break;
      }
      case Instruction::Kind::kReceive:
        use(each.a, Use::kPosted, Use::kDone);
        break;
      case Instruction::Kind::kSend:
        use(each.a, Use::kNone, Use::kDone);
        ++sends_;
        break;
      case Instruction::Kind::kSettle:
        require(between_hosts() && each.a >= 0 && each.a <= sends_, "a number of sends");
        break;
      default:
        require(false, "an instruction");
    }
  }

  const Program& p_;
  const Member me_;
  const OperationTraits& traits_;
  std::vector<Use> used_;  // by message
  std::int64_t events_ = 0;
  std::int64_t sends_ = 0;
};

}  // namespace

void Program::check(Member me) const { Checker(*this, me).check(); }

bool Program::serves(const Request& request) const {
  if (request.kind == OpKind::kBarrier) return true;  // which has nothing to read or write
  const DealtNodes* nodes = request.nodes.get();
  const bool dealt = nodes != nullptr ? nodes->deal == deal && nodes->leaves == leaves &&
                                            nodes->rows.size() == static_cast<std::size_t>(rows)
                                      : leaves == 0;
  return dealt && request.kind == kind && (request.root == root || !traits_of(kind).rooted);
}

}  // namespace pycollective
