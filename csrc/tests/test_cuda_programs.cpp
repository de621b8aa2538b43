// Programs that kernels carry out in peer memory give the bits of the CPU's kernels, and touch
// nothing else: each rank's memory in a call is compared whole.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/cases.h"
#include "tests/device_calls.h"

namespace pycollective::testing {
namespace {

constexpr std::size_t kMemory = std::size_t{4} << 20;  // of a rank

// All programs that there are for this many ranks of one host.
std::vector<Programs> programs_of(int ranks) {
  std::vector<Programs> found;
  for (const char* file : {"programs.txt", "device_programs.txt"})
    for (std::vector<RealProgram>& schedule : read_programs(file)) {
      const Program& first = schedule.front().program;
      if (first.ranks != ranks || first.members != ranks) continue;
      Programs programs;
      for (RealProgram& each : schedule)
        programs.push_back(std::make_shared<const Program>(std::move(each.program)));
      found.push_back(programs);
    }
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce}) {
    Programs programs;
    for (int r = 0; r < ranks; ++r)
      programs.push_back(make_one_shot(kind, kind == OpKind::kReduce ? ranks - 1 : 0, r, ranks));
    found.push_back(programs);
  }
  return found;
}

// Calls one after the other, each with memory of its own, and only then looked at.
class Batch {
 public:
  Batch(DeviceRanks& ranks, Random& random) : ranks_(ranks), random_(random) {}
  ~Batch() { CHECK(calls_.empty()); }
  void add(const Call& call) {
    Placed placed(call, at_, random_);
    CHECK(placed.bytes() <= kMemory);
    if (at_ + placed.bytes() > kMemory) {
      run();
      placed = Placed(call, 0, random_);
    }
    at_ += placed.bytes();
    calls_.push_back(std::move(placed));
  }
  void run() {
    for (const Placed& each : calls_) each.write(ranks_);
    for (const Placed& each : calls_) each.launch(ranks_);
    ranks_.synchronize();
    ranks_.check_no_endings();
    for (const Placed& each : calls_) each.check(ranks_);
    count_ += calls_.size();
    calls_.clear();
    at_ = 0;
  }
  std::size_t count() const { return count_; }

 private:
  DeviceRanks& ranks_;
  Random& random_;
  std::vector<Placed> calls_;
  std::size_t at_ = 0, count_ = 0;
};

std::size_t some_count(Random& random, std::size_t most) {
  switch (random() % 8) {
    case 0:
      return 0;
    case 1:
      return 1 + random() % 9;
    case 2:
      return 64 * (random() % (most / 64));
    default:
      return random() % most;
  }
}

// A call of a program: what else there is to it is drawn.
Call draw(const Programs& programs, Dtype dtype, ReduceOp op, std::size_t most, Random& random) {
  Call call;
  call.programs = programs;
  call.dtype = dtype;
  call.op = op;
  const std::size_t element = call.element();
  const auto n = static_cast<std::size_t>(call.ranks());
  call.count = some_count(random, most);
  if (in_shards(call.kind())) call.count /= n;
  if (takes_counts(call.kind()) && random() % 2 == 0)
    for (std::size_t r = 0; r < n; ++r) call.counts.push_back(some_count(random, most) / n);
  call.in_place = random() % 3 == 0;
  // Aligned, as elements are, or not even so.
  const auto offset = [&] {
    const std::size_t any = random() % 16;
    return random() % 2 == 0 ? 0 : random() % 4 == 0 ? any : any / element * element;
  };
  call.input_offset = offset();
  call.output_offset = random() % 2 == 0 ? call.input_offset : offset();
  return call;
}

using Pair = std::pair<Dtype, ReduceOp>;

std::vector<Pair> all_reductions() {
  std::vector<Pair> pairs;
  for (const DtypeTraits& dtype : kDtypeTable)
    for (const ReduceOpTraits& op : kReduceOpTable)
      if (is_defined(dtype.dtype, op.op)) pairs.emplace_back(dtype.dtype, op.op);
  return pairs;
}

bool is_short_list(const Program& program) {
  return program.algorithm == "one_shot" || program.algorithm == "direct";
}

// Every program, by every dtype and operation (one-shot and direct) or by some.
std::size_t every_program(Devices& devices, int n, bool on_one, std::size_t slot_bytes,
                          unsigned seed, std::size_t expected_without_room) {
  Random random(seed);
  DeviceRanks ranks(devices, n, {on_one ? 1U : 2U, slot_bytes}, kMemory, on_one);
  Batch batch(ranks, random);
  std::size_t without_room = 0;
  const std::vector<Pair> reductions = all_reductions();
  for (const Programs& programs : programs_of(n)) {
    const Program& program = *programs[0];
    std::vector<Pair> pairs;
    if (reduces(program.kind) && is_short_list(program)) {
      pairs = reductions;
    } else if (reduces(program.kind)) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProd})
        for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32,
                                  Dtype::kFloat64, Dtype::kFloat8E4M3, Dtype::kFloat8E5M2})
          pairs.emplace_back(dtype, op);
      pairs.insert(pairs.end(), {{Dtype::kBFloat16, ReduceOp::kMax},
                                 {Dtype::kInt32, ReduceOp::kSum},
                                 {Dtype::kInt16, ReduceOp::kAvg},
                                 {Dtype::kUInt8, ReduceOp::kBxor}});
    } else {
      for (const DtypeTraits& dtype : kDtypeTable) pairs.emplace_back(dtype.dtype, ReduceOp::kSum);
    }
    for (const auto& [dtype, op] : pairs)
      if (ranks.at(0).peers->has_room(program, dtype, op))
        batch.add(draw(programs, dtype, op, 3000, random));
      else
        ++without_room;
  }
  batch.run();
  CHECK(without_room == expected_without_room);
  return batch.count();
}

// Threads meet before an instruction that reads what the last one wrote, or writes what it read;
// and not where they need not.
void threads_meet_where_places_are_shared() {
  const auto meets = [](Place from, Place to) {
    Program program = *make_one_shot(OpKind::kAllReduce, 0, 0, 1);
    program.refs = {{Place::kInput, Member(0), 0, 0},
                    {Place::kItem, Member(0), 0, 0},
                    {from, Member(0), 0, 0},
                    {to, Member(0), 0, 1}};
    program.items = 2;
    program.instructions = {{Instruction::Kind::kCopy, 0, 1, 0},
                            {Instruction::Kind::kCopy, 2, 3, 0}};
    const DeviceProgram lowered = lower_for_device(program, Member(0));
    constexpr std::uint32_t kWordsOfACopy = 3;
    return (lowered.words[lowered.ref_count + kWordsOfACopy] & cuda::kMeets) != 0;
  };
  CHECK(meets(Place::kItem, Place::kItem));     // the first one's result
  CHECK(meets(Place::kInput, Place::kOutput));  // where its input may lie
  CHECK(!meets(Place::kInput, Place::kItem));
}

// Whatever is to be cut: parts are of whole units, lie in their slots, and cover everything.
void parts_fit_their_slots() {
  Random random(3);
  for (int i = 0; i < 100'000; ++i) {
    const std::size_t element = std::size_t{1} << random() % 4;
    const std::size_t places = element * (random() % 40) + 4 * (random() % 40);
    const cuda::MailboxShape shape{1 + static_cast<std::uint32_t>(random() % 40),
                                   256 * (1 + random() % 4096)};
    if (64 * places > shape.slot_bytes) continue;
    const std::uint64_t longest = (random() & random()) >> random() % 60;
    const PeerMemory::Cut cut = PeerMemory::cut(longest, element, places, shape);
    CHECK(cut.part >= 64 && cut.part % 64 == 0 && cut.part * places <= shape.slot_bytes);
    CHECK(cut.blocks <= shape.blocks && cut.blocks <= cut.chunks);
    CHECK((longest == 0) == (cut.chunks == 0));
    if (longest == 0) continue;
    CHECK(cut.chunks * cut.part >= longest && (cut.chunks - 1) * cut.part < longest);
    // As many blocks as there are, before one has a second chunk.
    CHECK(cut.blocks == shape.blocks || cut.chunks == cut.blocks);
  }
}

template <class Body>
void refuses(const Body& body, const char* what) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    if (std::string(error.what()).find(what) != std::string::npos) return;
    std::fprintf(stderr, "%s\n", error.what());
  }
  CHECK(false);
}

void what_cannot_be_is_refused_by_name(Devices& devices) {
  Random random(4);
  DeviceRanks ranks(devices, 3, {1, 512}, kMemory);
  std::map<std::string, Programs> programs;
  for (const Programs& each : programs_of(3))
    if (each[0]->kind == OpKind::kAllReduce) programs[each[0]->algorithm] = each;
  Call call;
  call.programs = programs.at("direct");
  call.count = 100;
  const auto launch = [&](int rank, int launched_by) {
    const Placed placed(call, 0, random);
    Rank& by = ranks.at(launched_by);
    const Request request = placed.request(by, rank);
    by.peers->launch(Task(request), by.stream, 1);
  };
  refuses([&] { launch(0, 0); }, "'direct' needs 768 bytes of each slot, and they have 512");
  call.programs = programs.at("one_shot");
  refuses([&] { launch(1, 0); }, "'one_shot' is another rank's");
  Placed placed(call, 0, random);
  Request request = placed.request(ranks.at(0), 0);
  const auto launch_request = [&] {
    ranks.at(0).peers->launch(Task(request), ranks.at(0).stream, 1);
  };
  request.reduce_op = ReduceOp::kBand;
  refuses(launch_request, "band has no meaning for float32");
  request.reduce_op = ReduceOp::kSum;
  request.kind = OpKind::kBroadcast;
  refuses(launch_request, "the program is another call's");
  Program deep = *make_one_shot(OpKind::kAllReduce, 0, 0, 8);  // takes all, then combines
  deep.nodes = 1;
  deep.refs[static_cast<std::size_t>(deep.instructions.back().b)].place = Place::kNode;
  deep.combines[0].finish = false;
  std::stable_partition(deep.recipes.begin(), deep.recipes.end(),
                        [](std::uint8_t step) { return step == kRecipeTake; });
  refuses([&] { lower_for_device(deep, Member(0)); }, "keeps more than 6 operands");
  for (const std::vector<RealProgram>& schedule : read_programs("programs.txt"))
    if (schedule[0].program.members != schedule[0].program.ranks)
      refuses([&] { lower_for_device(schedule[0].program, schedule[0].me); },
              "messages between hosts");
  ranks.check_no_endings();
}

}  // namespace
}  // namespace pycollective::testing

// With an argument: of so many ranks at most, which is for tools that make all slow.
int main(int count, char** arguments) {
  using namespace pycollective::testing;
  const int most = count > 1 ? std::atoi(arguments[1]) : 8;
  CHECK(most >= 1 && most <= 8);
  parts_fit_their_slots();
  threads_meet_where_places_are_shared();
  Devices devices;
  Cases cases;
  cases.run("what cannot be is refused by name",
            [&] { what_cannot_be_is_refused_by_name(devices); });
  std::size_t calls = 0;
  for (int n = 1; n <= most; ++n) {
    // In the small slots three programs of eight ranks have no room for nodes of float64: to add,
    // to average, to multiply.
    std::printf("%d ranks\n", n);
    cases.run("in small slots",
              [&] { calls += every_program(devices, n, false, 8192, 1, n == 8 ? 9 : 0); });
    cases.run("in large slots", [&] { calls += every_program(devices, n, true, 65536, 2, 0); });
  }
  CHECK(most < 8 || calls >= 8300);  // of all that the files hold for one host
  std::printf("%zu calls on %d GPU%s\n", calls, devices.size(), devices.size() == 1 ? "" : "s");
  return 0;
}
