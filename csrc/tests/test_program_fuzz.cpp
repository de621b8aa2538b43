// Program::check is a proof: no program that passes touches what is not its own. Real programs are
// spoiled at random, and what still passes is run where it is for one host (of several it is only
// checked), with ASan as the judge: the caller's buffers are
// as long as they must be and no longer, and of shared memory all is poisoned but the slots.
//
//   test_program_fuzz [seconds] [seed]
//
// One rank runs what was spoiled, the others what is right; one thread drives all in turn, so that
// a program that waits for ever is only one that gets no further.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "engine/scheduled.h"
#include "tests/check.h"
#include "tests/program_text.h"
#include "tests/thread_ranks.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#endif

using namespace pycollective;
using pycollective::testing::RealProgram;
using pycollective::testing::ThreadRanks;

namespace {

using Random = std::mt19937_64;
constexpr std::size_t kDataBytes = std::size_t{32} << 10;
constexpr int kMostTurns = 300;

int below(Random& random, std::size_t end) { return static_cast<int>(random() % end); }

std::int32_t less_one(std::int32_t number) { return number == INT32_MIN ? number : number - 1; }

// A number that is likely to be one too many, or another's.
std::int32_t odd_number(Random& random, const Program& p) {
  const std::int32_t numbers[] = {0,
                                  1,
                                  -1,
                                  2,
                                  3,
                                  p.rank,
                                  p.root,
                                  p.ranks,
                                  p.members,
                                  less_one(p.shards),
                                  p.shards,
                                  less_one(p.nodes),
                                  p.nodes,
                                  less_one(p.items),
                                  p.items,
                                  64,
                                  1 << 20,
                                  INT32_MAX,
                                  INT32_MIN,
                                  static_cast<std::int32_t>(p.refs.size()),
                                  below(random, 8),
                                  below(random, std::max<std::size_t>(p.refs.size(), 1))};
  return numbers[below(random, std::size(numbers))];
}

template <class T>
T* any_of(Random& random, std::vector<T>& list) {
  return list.empty() ? nullptr : &list[static_cast<std::size_t>(below(random, list.size()))];
}

void spoil_instructions(Random& random, Program& p) {
  auto& all = p.instructions;
  if (all.empty()) return;
  const auto at = all.begin() + below(random, all.size());
  switch (below(random, 4)) {
    case 0:
      all.erase(at);
      break;
    case 1: {
      const Instruction copy = *at;
      all.insert(all.begin() + below(random, all.size()), copy);
      break;
    }
    case 2:
      std::swap(*at, *any_of(random, all));
      break;
    default:
      at->kind = static_cast<Instruction::Kind>(below(random, 9));
  }
}

void spoil(Random& random, Program& p) {
  const std::int32_t number = odd_number(random, p);
  switch (below(random, 12)) {
    case 0:
    case 1:
    case 2:
      if (Ref* ref = any_of(random, p.refs)) {
        switch (below(random, 4)) {
          case 0:
            ref->place = static_cast<Place>(below(random, 5));
            break;
          case 1:
            ref->member = Member(number);
            break;
          case 2:
            ref->shard = number;
            break;
          default:
            ref->index = number;
        }
      }
      break;
    case 3:
    case 4:
    case 5:
      if (Instruction* each = any_of(random, p.instructions))
        (below(random, 3) == 0 ? each->a : below(random, 2) == 0 ? each->b : each->c) = number;
      break;
    case 6:
      spoil_instructions(random, p);
      break;
    case 7:
      if (CombineStep* each = any_of(random, p.combines)) {
        std::int32_t* fields[] = {&each->first_term, &each->terms, &each->first_recipe,
                                  &each->recipe_length};
        if (const int field = below(random, 5); field < 4)
          *fields[field] = number;
        else
          each->finish = !each->finish;
      }
      break;
    case 8:
      if (std::int32_t* term = any_of(random, p.terms)) *term = number;
      break;
    case 9:
      if (std::uint8_t* step = any_of(random, p.recipes)) *step = std::uint8_t(below(random, 3));
      break;
    case 10:
      if (Member* reader = any_of(random, p.readers)) *reader = Member(number);
      break;
    default: {
      std::int32_t* fields[] = {&p.root, &p.rank,   &p.ranks, &p.members,
                                &p.tags, &p.shards, &p.nodes, &p.items};
      if (const int field = below(random, 10); field < 8)
        *fields[field] = number;
      else if (field == 8)
        p.kind = static_cast<OpKind>(below(random, kOpKinds + 1));
      else
        p.pieces = static_cast<Pieces>(below(random, 3));
    }
  }
}

// The ranks of a group, whose state a run leaves as it found it.
class OneHost {
 public:
  explicit OneHost(int ranks) : threads_(ranks), ranks_(threads_.make_group(60, kDataBytes)) {
    const std::size_t small = 2 * small_buffer_bytes(kDataBytes);
    for (const Member each : group(0).members()) {
      ASAN_POISON_MEMORY_REGION(group(0).data(each), small);
      ASAN_POISON_MEMORY_REGION(group(0).data(each) + kDataBytes, kPage);
    }
  }
  Group& group(int rank) { return ranks_[static_cast<std::size_t>(rank)]->group(); }
  int size() const { return static_cast<int>(ranks_.size()); }
  std::byte* slots(Member member) {
    return group(0).data(member) + 2 * small_buffer_bytes(kDataBytes);
  }
  static constexpr std::size_t slot_bytes() {
    return kDataBytes - 2 * small_buffer_bytes(kDataBytes);
  }
  void reset() {
    for (const Member each : group(0).members()) {
      Mailbox& mailbox = group(0).mailbox(each);
      for (Arrival& arrival : mailbox.arrival) arrival.sequence = 0;
      mailbox.progress.copied_in = mailbox.progress.combined = 0;
      for (auto& published : mailbox.published) published.mark = 0;
    }
  }

 private:
  ThreadRanks threads_;
  std::vector<std::shared_ptr<Communicator>> ranks_;
};

// A rank's buffers, each on the heap by itself.
struct Buffers {
  std::unique_ptr<std::byte[]> input;
  std::unique_ptr<std::byte[]> output;
  std::vector<std::byte> given;
};

std::size_t elements_of(const Buffer& buffer, const Request& request, int rank, int ranks) {
  if (!has(buffer, rank, request.root)) return 0;
  const auto shard = [&](int r) {
    return request.counts.empty() ? request.count : request.counts[static_cast<std::size_t>(r)];
  };
  std::size_t all = 0;
  for (int r = 0; r < ranks; ++r) all += shard(r);
  return buffer.holds == Holds::kVector  ? request.count
         : buffer.holds == Holds::kShard ? shard(rank)
                                         : all;
}

Request request_for(Random& random, const Program& program) {
  constexpr std::pair<Dtype, ReduceOp> kTypes[] = {{Dtype::kFloat16, ReduceOp::kSum},
                                                   {Dtype::kFloat32, ReduceOp::kAvg},
                                                   {Dtype::kInt8, ReduceOp::kSum},
                                                   {Dtype::kFloat64, ReduceOp::kMax}};
  constexpr std::size_t kCounts[] = {0, 1, 5, 64, 129, 700, 3001};
  Request request;
  request.kind = program.kind;
  request.root = program.root;
  std::tie(request.dtype, request.reduce_op) = kTypes[below(random, std::size(kTypes))];
  request.count = kCounts[below(random, std::size(kCounts))];
  if (takes_counts(program.kind) && random() % 2 == 0)
    for (int r = 0; r < program.ranks; ++r)
      request.counts.push_back(r % 2 == 0 ? request.count : request.count / 3);
  return request;
}

struct Counts {
  long refused = 0;
  long run = 0;
  long finished = 0;
};

// Runs a schedule in which one rank, `spoiled`, has another program; -1: none has.
void run(Random& random, OneHost& ranks, const std::vector<RealProgram>& schedule, int spoiled,
         const std::shared_ptr<const Program>& program, Counts& counts) {
  const int n = ranks.size();
  const Request like = request_for(random, schedule.front().program);
  const OperationTraits& traits = traits_of(like.kind);
  std::vector<Request> requests(static_cast<std::size_t>(n), like);
  std::vector<Buffers> buffers(static_cast<std::size_t>(n));
  std::vector<std::unique_ptr<Scheduled>> operations;
  for (int r = 0; r < n; ++r) {
    Request& request = requests[static_cast<std::size_t>(r)];
    Buffers& own = buffers[static_cast<std::size_t>(r)];
    const std::size_t read = elements_of(traits.input, like, r, n) * size_of(like.dtype);
    const std::size_t written = elements_of(traits.output, like, r, n) * size_of(like.dtype);
    if (read != 0) own.input.reset(new std::byte[read]);
    for (std::size_t i = 0; i < read; ++i) own.input[i] = std::byte(below(random, 100));
    if (written != 0) own.output.reset(new std::byte[written]);
    own.given.assign(own.input.get(), own.input.get() + read);
    request.input = own.input.get();
    request.output = own.output.get();
    request.program =
        r == spoiled
            ? program
            : std::make_shared<const Program>(schedule[static_cast<std::size_t>(r)].program);
    try {
      Scheduled::require_room(ranks.group(r), request);
    } catch (const CollectiveFailure&) {
      ++counts.refused;
      return;
    }
    operations.push_back(std::make_unique<Scheduled>(ranks.group(r), request, 1));
  }
  for (const auto& operation : operations) operation->start();
  std::vector<bool> done(static_cast<std::size_t>(n), false);
  std::vector<std::byte> before(OneHost::slot_bytes() * static_cast<std::size_t>(n));
  bool progressed = true;
  for (int turn = 0; progressed && turn < kMostTurns; ++turn) {
    progressed = false;
    for (int r = 0; r < n; ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (done[index]) continue;
      const auto slots = [&](const auto& act) {
        for (const Member each : ranks.group(0).members())
          if (each.index() != r) act(before.data() + each.at() * OneHost::slot_bytes(), each);
      };
      if (r == spoiled)
        slots([&](std::byte* copy, Member each) {
          std::memcpy(copy, ranks.slots(each), OneHost::slot_bytes());
        });
      const State state = operations[index]->advance();
      if (r == spoiled)
        slots([&](std::byte* copy, Member each) {  // it writes none of its peers'
          CHECK(std::memcmp(copy, ranks.slots(each), OneHost::slot_bytes()) == 0);
        });
      done[index] = state == State::kDone;
      progressed = progressed || state != State::kBlocked;
    }
  }
  for (const Buffers& own : buffers)
    CHECK(own.given.empty() ||
          std::memcmp(own.given.data(), own.input.get(), own.given.size()) == 0);
  ++counts.run;
  counts.finished += std::count(done.begin(), done.end(), true) == n;
  if (spoiled < 0) CHECK(std::count(done.begin(), done.end(), true) == n);
  ranks.reset();
}

}  // namespace

int main(int arguments, char** argument) {
  const double seconds = arguments > 1 ? std::atof(argument[1]) : 5;
  const std::uint64_t seed = arguments > 2 ? std::strtoull(argument[2], nullptr, 10) : 1;
  const auto schedules = pycollective::testing::read_programs("programs.txt");
  CHECK(!schedules.empty());
  std::vector<std::unique_ptr<OneHost>> groups;
  for (int n = 0; n <= 4; ++n) groups.push_back(n == 0 ? nullptr : std::make_unique<OneHost>(n));
  Random random(seed);
  Counts right;
  const auto on_one_host = [](const auto& schedule) {
    return schedule.front().program.members == schedule.front().program.ranks;
  };
  for (const auto& schedule : schedules) {  // as they are, all pass and come to an end
    for (const RealProgram& real : schedule) real.program.check(real.me);
    if (on_one_host(schedule)) run(random, *groups[schedule.size()], schedule, -1, nullptr, right);
  }
  CHECK(right.run > 0 && right.finished == right.run && right.refused == 0);
  Counts counts;
  long tried = 0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (; std::chrono::steady_clock::now() < until; ++tried) {
    const auto& schedule = schedules[static_cast<std::size_t>(below(random, schedules.size()))];
    const int rank = below(random, schedule.size());
    const RealProgram& real = schedule[static_cast<std::size_t>(rank)];
    auto program = std::make_shared<Program>(real.program);
    for (int changes = 1 + below(random, 3); changes > 0; --changes) spoil(random, *program);
    try {
      program->check(real.me);
    } catch (const std::invalid_argument&) {
      ++counts.refused;
      continue;
    }
    if (on_one_host(schedule))
      run(random, *groups[schedule.size()], schedule, rank, program, counts);
  }
  CHECK(counts.run > 0 && counts.refused > 0);
  std::printf("program fuzz: passed (seed %llu: %ld spoiled, %ld refused, %ld run, %ld finished)\n",
              static_cast<unsigned long long>(seed), tried, counts.refused, counts.run,
              counts.finished);
}
