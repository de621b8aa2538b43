// Programs in the engine: recursive doubling among a power of two of ranks, written out by hand.
#include <cstdio>
#include <memory>

#include "engine/plans/program.h"
#include "tests/check.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using pycollective::testing::ThreadRanks;

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
        Request request;
        request.kind = OpKind::kAllReduce;
        request.dtype = Dtype::kFloat32;
        request.count = count;
        request.input = request.output = x.data();
        Request own_way = request;  // and the direct paths in turn
        own_way.input = own_way.output = y.data();
        request.program = programs[static_cast<std::size_t>(r)];
        const auto first = group[r]->submit(request, nullptr);
        group[r]->run(own_way, {});
        CHECK(first->wait(30, {}));
        for (std::size_t i = 0; i < count; ++i) CHECK(x[i] == y[i]);
      });
  threads.run([&](int r) { group[r]->close(); });
}

void different_algorithms_are_a_mismatch() {
  ThreadRanks threads(2);
  const auto group = threads.make_group();
  threads.run([&](int r) {
    std::vector<float> x(1000, 1.0F);
    Request request;
    request.kind = OpKind::kAllReduce;
    request.dtype = Dtype::kFloat32;
    request.count = x.size();
    request.input = request.output = x.data();
    if (r == 1) request.program = Builder(r, 2).build();
    bool caught = false;
    try {
      group[r]->run(request, {});
    } catch (const CollectiveFailure& error) {
      caught = error.failure().kind == FailureKind::kMismatch &&
               error.failure().message.find("algorithm by_hand") != std::string::npos;
    }
    CHECK(caught && x[999] == 1.0F);
  });
}

// What check() proves holds for one operation and one root, of one communicator.
void a_program_of_another_call_is_refused() {
  ThreadRanks threads(2);
  const auto group = threads.make_group();
  std::vector<float> x(1000, 1.0F);
  Request request;
  request.kind = OpKind::kReduce;
  request.dtype = Dtype::kFloat32;
  request.count = x.size();
  request.input = request.output = x.data();
  for (const auto& [rank, ranks] : {std::pair{0, 2}, {1, 2}, {0, 4}}) {
    request.program = Builder(rank, ranks).build();
    bool refused = false;
    try {
      group[0]->run(request, {});
    } catch (const CollectiveFailure& error) {
      refused = error.failure().kind == FailureKind::kConfiguration;
    }
    CHECK(refused && group[0]->failure() == nullptr);
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
