#include "engine/gpu/device_program.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>

#include "engine/shards.h"
#include "kernels/kernels.h"

namespace pycollective {
namespace {

using cuda::InstructionCode;

void require(bool fits, const Program& program, const std::string& what) {
  if (!fits)
    throw std::invalid_argument("algorithm '" + program.algorithm + "' among " +
                                std::to_string(program.ranks) + " ranks does not fit a GPU's " +
                                "blocks: " + what);
}

// What instructions have read and written since the last barrier of a block's threads. A thread may
// read elements in one instruction that another thread has written in the one before.
class Hazards {
 public:
  void forget() { *this = Hazards(); }
  // Adds an instruction. Returns whether it needs a barrier before it.
  bool add(const std::vector<Ref>& reads, const Ref* const* writes, std::size_t write_count) {
    bool conflicts = false;
    for (const Ref& ref : reads) conflicts |= written_.count(key(ref)) != 0 || shares(ref, false);
    for (std::size_t i = 0; i < write_count; ++i)
      conflicts |= written_.count(key(*writes[i])) != 0 || read_.count(key(*writes[i])) != 0 ||
                   shares(*writes[i], true);
    if (conflicts) forget();
    for (const Ref& ref : reads) note(ref, read_, input_read_, Place::kInput);
    for (std::size_t i = 0; i < write_count; ++i)
      note(*writes[i], written_, output_written_, Place::kOutput);
    return conflicts;
  }

 private:
  using Key = std::tuple<int, int, std::int32_t>;
  static Key key(const Ref& ref) {
    const bool in_slot = ref.place == Place::kNode || ref.place == Place::kItem;
    return {static_cast<int>(ref.place), ref.member.index(), in_slot ? ref.index : ref.shard};
  }
  // The caller's output may be the input.
  bool shares(const Ref& ref, bool writes) const {
    return writes ? ref.place == Place::kOutput && input_read_
                  : ref.place == Place::kInput && output_written_;
  }
  static void note(const Ref& ref, std::set<Key>& set, bool& flag, Place place) {
    set.insert(key(ref));
    flag = flag || ref.place == place;
  }
  std::set<Key> read_, written_;
  bool input_read_ = false, output_written_ = false;
};

class Lowering {
 public:
  Lowering(const Program& program, Member me) : p_(program), me_(me) {}

  DeviceProgram run() {
    require(p_.members == p_.ranks && p_.messages.empty(), p_, "it has messages between hosts");
    require(p_.members <= cuda::kMostPeers, p_, "so many ranks");
    require(p_.pieces == Pieces::kPairs || p_.shards <= cuda::kMostShards, p_,
            std::to_string(p_.shards) + " shards");
    for (std::size_t i = 0; i < p_.instructions.size(); ++i) {
      const Instruction& each = p_.instructions[i];
      switch (each.kind) {
        case Instruction::Kind::kWait:
          i = wait(i);
          break;
        case Instruction::Kind::kPublish:
          events_ += each.a;
          require(events_ <= static_cast<std::int64_t>(cuda::kMostEvents), p_,
                  "more than " + std::to_string(cuda::kMostEvents) + " events");
          hazards_.forget();
          emit(InstructionCode::kPublish, cuda::kMeets, 0, static_cast<std::int32_t>(events_));
          break;
        case Instruction::Kind::kCopy:
          copy(each);
          break;
        case Instruction::Kind::kCombine:
          combine(each);
          break;
        default:
          require(false, p_, "it has messages between hosts");
      }
    }
    emit(InstructionCode::kEnd, 0, 0, 0);
    return finish();
  }

 private:
  // Merges successive waits into one for all their members. Returns the last one's number.
  std::size_t wait(std::size_t i) {
    std::map<std::int32_t, std::int32_t> events;
    for (;; ++i) {
      const Instruction& each = p_.instructions[i];
      events[each.a] = std::max(events[each.a], each.b);
      if (i + 1 == p_.instructions.size() ||
          p_.instructions[i + 1].kind != Instruction::Kind::kWait)
        break;
    }
    emit(InstructionCode::kWait, 0, events.size(), 0);
    for (const auto& [member, count] : events)
      code_.push_back(static_cast<std::uint32_t>(member) | static_cast<std::uint32_t>(count) << 8);
    hazards_.forget();
    return i;
  }

  void copy(const Instruction& each) {
    const Ref& from = ref(each.a);
    const Ref& to = ref(each.b);
    const Ref* const writes[] = {&to};
    const bool meets = hazards_.add({from}, writes, 1);
    const bool is_node = from.place == Place::kNode;
    emit(InstructionCode::kCopy, (meets ? cuda::kMeets : 0) | (is_node ? cuda::kFlag0 : 0), 0,
         length_shard(from));
    code_.push_back(number_of(from));
    code_.push_back(number_of(to));
  }

  void combine(const Instruction& each) {
    const CombineStep& step = p_.combines[static_cast<std::size_t>(each.a)];
    std::vector<Ref> terms;
    bool all_leaves = step.finish && step.terms == p_.ranks;
    for (std::int32_t t = 0; t < step.terms; ++t) {
      terms.push_back(ref(p_.terms[static_cast<std::size_t>(step.first_term + t)]));
      all_leaves = all_leaves && terms.back().place != Place::kNode;
    }
    const Ref& out = ref(each.b);
    const Ref* const writes[] = {&out, each.c == -1 ? nullptr : &ref(each.c)};
    const bool meets = hazards_.add(terms, writes, each.c == -1 ? 1 : 2);
    emit(InstructionCode::kCombine,
         (meets ? cuda::kMeets : 0) | (step.finish ? cuda::kFlag0 : 0) |
             (all_leaves ? cuda::kFlag1 : 0),
         terms.size(), length_shard(out));
    const std::uint32_t copy_to = each.c == -1 ? cuda::kNoRef : number_of(ref(each.c));
    code_.push_back(number_of(out) | copy_to << 16);
    code_.push_back(static_cast<std::uint32_t>(refs_.size()));
    for (const Ref& term : terms) refs_.push_back(encode(term));
    if (!all_leaves) recipe(step, terms);
  }

  // Turns the postfix recipe into the number of combinations after each operand.
  void recipe(const CombineStep& step, const std::vector<Ref>& terms) {
    int kept = -1;  // the last one is not on the stack
    std::size_t next = 0;
    for (std::int32_t k = 0; k < step.recipe_length; ++k) {
      if (p_.recipes[static_cast<std::size_t>(step.first_recipe + k)] == kRecipeTake) {
        code_.push_back(terms[next++].place == Place::kNode ? 1 : 0);
        require(++kept <= cuda::kMostKept, p_,
                "it keeps more than " + std::to_string(cuda::kMostKept) + " operands");
      } else {
        code_.back() += 2;
        --kept;
      }
    }
  }

  const Ref& ref(std::int32_t number) const { return p_.refs[static_cast<std::size_t>(number)]; }

  std::int32_t length_shard(const Ref& ref) const {
    return p_.pieces == Pieces::kPairs ? 0 : ref.shard;
  }

  static std::uint32_t encode_as(cuda::PlaceCode place, const Ref& ref, std::int32_t number) {
    return static_cast<std::uint32_t>(place) | static_cast<std::uint32_t>(ref.member.index()) << 2 |
           static_cast<std::uint32_t>(number) << 8;
  }
  std::uint32_t encode(const Ref& ref) const {
    if (ref.place == Place::kNode) return encode_as(cuda::PlaceCode::kNode, ref, ref.index);
    if (ref.place == Place::kItem) return encode_as(cuda::PlaceCode::kItem, ref, ref.index);
    const int begin = begin_of(p_, ref.place, ref.shard);
    return encode_as(
        ref.place == Place::kInput ? cuda::PlaceCode::kInput : cuda::PlaceCode::kOutput, ref,
        begin == kBeginsAtZero ? cuda::kNoBegin : begin);
  }
  std::uint32_t number_of(const Ref& ref) {
    const std::uint32_t word = encode(ref);
    const auto [found, is_new] = numbers_.emplace(word, static_cast<std::uint32_t>(refs_.size()));
    if (is_new) refs_.push_back(word);
    return found->second;
  }

  void emit(InstructionCode kind, std::uint32_t flags, std::size_t number, std::int32_t shard) {
    code_.push_back(static_cast<std::uint32_t>(kind) | flags |
                    static_cast<std::uint32_t>(number) << 8 |
                    static_cast<std::uint32_t>(shard) << 16);
  }

  DeviceProgram finish() {
    require(refs_.size() <= cuda::kMostRefs, p_, std::to_string(refs_.size()) + " places");
    require(refs_.size() + code_.size() <= cuda::kMostWords, p_,
            std::to_string(refs_.size() + code_.size()) + " words");
    DeviceProgram done;
    done.ref_count = static_cast<std::uint32_t>(refs_.size());
    done.words = std::move(refs_);
    done.words.insert(done.words.end(), code_.begin(), code_.end());
    for (const Member reader : p_.readers) done.readers |= std::uint64_t{1} << reader.index();
    return done;
  }

  const Program& p_;
  const Member me_;
  std::vector<std::uint32_t> refs_, code_;
  std::map<std::uint32_t, std::uint32_t> numbers_;
  Hazards hazards_;
  std::int64_t events_ = 0;
};

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

DeviceProgram lower_for_device(const Program& program, Member me) {
  program.check(me);
  return Lowering(program, me).run();
}

std::shared_ptr<const Program> make_one_shot(OpKind kind, int root, int rank, int ranks) {
  if (kind != OpKind::kAllReduce && kind != OpKind::kReduce)
    throw std::invalid_argument(std::string("there is no one-shot ") + name_of(kind));
  using Kind = Instruction::Kind;
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
