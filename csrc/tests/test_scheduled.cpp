// Programs in the engine: recursive doubling among a power of two of ranks, written out by hand.
#include <cstdio>
#include <memory>

#include "engine/plans/program.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

class Builder {
 public:
  Builder(int rank, int ranks) : rank_(rank) {
    program_.algorithm = "by_hand";
    program_.kind = OpKind::kAllReduce;
    program_.rank = rank;
    program_.ranks = program_.members = ranks;
    program_.steps = program_.shards = 1;
    program_.items = 1;
  }

  // In step k the ranks that differ in bit k read each other's node, and combine the two.
  std::shared_ptr<const Program> build() {
    const int input = ref(Place::kInput, rank_, 0);
    int mine = ref(Place::kItem, rank_, 0);
    emit(Instruction::Kind::kCopy, input, mine);
    int step = 0;
    for (int bit = 1; bit < program_.ranks; bit *= 2, ++step) {
      const int peer = rank_ ^ bit;
      program_.readers.emplace_back(peer);
      emit(Instruction::Kind::kPublish, 1);
      emit(Instruction::Kind::kWait, peer, step + 1);
      const int theirs = step == 0 ? ref(Place::kItem, peer, 0) : ref(Place::kNode, peer, step - 1);
      const bool last = 2 * bit == program_.ranks;
      const int out =
          last ? ref(Place::kOutput, rank_, 0) : ref(Place::kNode, rank_, program_.nodes++);
      combine(rank_ < peer ? mine : theirs, rank_ < peer ? theirs : mine, out, last);
      mine = out;
    }
    program_.check(Member(rank_));
    return std::make_shared<const Program>(std::move(program_));
  }

 private:
  int ref(Place place, int rank, int index) {
    // A node of a peer: all have as many.
    if (place == Place::kNode && index >= program_.nodes) program_.nodes = index + 1;
    program_.refs.push_back({place, Member(rank), 0, index});
    return static_cast<int>(program_.refs.size()) - 1;
  }
  void emit(Instruction::Kind kind, int a, int b = 0, int c = 0) {
    program_.instructions.push_back({kind, a, b, c});
  }
  void combine(int left, int right, int out, bool finish) {
    program_.combines.push_back(
        {static_cast<std::int32_t>(program_.terms.size()), 2, 0, 3, finish});
    program_.terms.insert(program_.terms.end(), {left, right});
    program_.recipes = {0, 0, 1};
    emit(Instruction::Kind::kCombine, static_cast<int>(program_.combines.size()) - 1, out, -1);
  }

  int rank_;
  Program program_;
};

float value(int rank, std::size_t i) { return static_cast<float>(rank + 1) + float(i % 97); }

void all_reduce_by_hand(int ranks, std::size_t data_bytes) {
  ThreadRanks threads(ranks);
  const auto group = threads.make_group(60, data_bytes);
  std::vector<std::shared_ptr<const Program>> programs;
  for (int r = 0; r < ranks; ++r) programs.push_back(Builder(r, ranks).build());
  for (const std::size_t count : {0, 1, 63, 1000, 20011, 300001})
    for (int repeat = 0; repeat < 3; ++repeat)
      threads.run([&](int r) {
        std::vector<float> x(count);
        std::vector<float> y(count);
        for (std::size_t i = 0; i < count; ++i) x[i] = y[i] = value(r, i);
        Request request = all_reduce(x);
        request.program = programs[static_cast<std::size_t>(r)];
        const auto first = group[r]->submit(request, nullptr);
        group[r]->run(all_reduce(y), {});  // and the direct paths in turn
        CHECK(first->wait(30, {}));
        for (std::size_t i = 0; i < count; ++i) CHECK(x[i] == y[i]);
      });
  threads.run([&](int r) { group[r]->close(); });
}

void different_algorithms_are_a_mismatch() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    std::vector<float> x(1000, 1.0F);
    Request request = all_reduce(x);
    if (r == 1) request.program = Builder(r, 2).build();
    const Failure failure = failure_of([&] { group[r]->run(request, {}); });
    CHECK(failure.kind == FailureKind::kMismatch);
    CHECK(contains(failure.message, "algorithm by_hand") && x[999] == 1.0F);
  });
}

// What check() proves holds for one operation and one root, of one communicator.
void a_program_of_another_call_is_refused() {
  const ThreadGroup group(2);
  std::vector<float> x(1000, 1.0F);
  Request request = all_reduce(x);
  request.kind = OpKind::kReduce;
  for (const auto& [rank, ranks] : {std::pair{0, 2}, {1, 2}, {0, 4}}) {
    request.program = Builder(rank, ranks).build();
    const Failure refused = failure_of([&] { group[0]->run(request, {}); });
    CHECK(refused.kind == FailureKind::kConfiguration && group[0]->failure() == nullptr);
    request.kind = OpKind::kAllReduce;  // the others are for another rank, and for more of them
  }
}

template <class Break>
void refuses(const Break& spoil) {
  Program program = *Builder(0, 4).build();
  spoil(program);
  bool refused = false;
  try {
    program.check(Member(0));
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void broken_programs_are_refused() {
  refuses([](Program& p) { p.refs[0].shard = 1; });
  refuses([](Program& p) { p.refs[1].member = Member(4); });
  refuses([](Program& p) { p.refs[2].index = p.items; });
  refuses([](Program& p) { p.instructions[0].b = 99; });
  refuses([](Program& p) { p.instructions[0].b = 0; });  // the input is not written
  refuses([](Program& p) { p.instructions[2].a = 0; });  // a rank does not wait for itself
  refuses([](Program& p) { p.instructions[2].b = 0; });
  refuses([](Program& p) { p.terms[0] = -1; });
  refuses([](Program& p) { p.recipes = {0, 1, 0}; });
  refuses([](Program& p) { p.combines[0].terms = 3; });
  refuses([](Program& p) { p.readers.emplace_back(0); });
  refuses([](Program& p) { p.algorithm = std::string(24, 'x'); });
  refuses([](Program& p) { p.instructions.push_back({Instruction::Kind::kSend, 0, 0, 0}); });
  refuses([](Program& p) { p.instructions.push_back({Instruction::Kind::kSettle, 1, 0, 0}); });
  // On one host there is nobody to wait for.
  refuses([](Program& p) { p.instructions.push_back({Instruction::Kind::kSettle, 0, 0, 0}); });
  refuses([](Program& p) { p.rank = 1; });
  refuses([](Program& p) { p.shards = kCountableRanks + 1; });
  refuses([](Program& p) { p.kind = OpKind::kReduceScatter; });  // which has no such pieces
  refuses([](Program& p) { p.kind = OpKind::kBroadcast; });      // which reduces nothing
  refuses([](Program& p) { p.kind = static_cast<OpKind>(kOpKinds); });
  refuses([](Program& p) {  // another rank's output
    p.kind = OpKind::kReduce;
    p.root = 1;
  });
  refuses([](Program& p) { p.combines[0].finish = true; });  // a result into a node
  refuses([](Program& p) { p.combines[1].finish = false; });
  refuses([](Program& p) { p.instructions[0].a = p.instructions[3].b; });  // a node into an item
  refuses([](Program& p) { p.instructions.back().c = p.instructions.back().b; });
  refuses([](Program& p) { p.peers.push_back(1); });
}

}  // namespace

int main() {
  for (const int ranks : {2, 4, 8}) all_reduce_by_hand(ranks, 0);
  all_reduce_by_hand(4, std::size_t{32} << 10);
  different_algorithms_are_a_mismatch();
  broken_programs_are_refused();
  a_program_of_another_call_is_refused();
  std::puts("scheduled: passed");
}
