// Program::check is a proof: no program that passes touches what is not its own. Real programs are
// spoiled at random, and what still passes is run (where it is for one host;
// test_internode_fuzz.cpp has several), with ASan as the judge: the caller's buffers are as long as
// they must be and no longer, and of shared memory all is poisoned but the slots.
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
#include <deque>
#include <memory>
#include <random>

#include "engine/operations/scheduled.h"
#include "tests/check.h"
#include "tests/program_text.h"
#include "tests/spoiled_programs.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

constexpr std::size_t kDataBytes = std::size_t{32} << 10;
constexpr int kMostTurns = 300;

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
  std::byte* slots(Member member) { return group(0).slots(member); }
  std::size_t slots_bytes() { return group(0).slots_bytes(); }
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
  std::vector<Request> requests(static_cast<std::size_t>(n), like);
  std::vector<Buffers> buffers(static_cast<std::size_t>(n));
  std::deque<Task> tasks;
  std::vector<std::unique_ptr<Scheduled>> operations;
  for (int r = 0; r < n; ++r) {
    Request& request = requests[static_cast<std::size_t>(r)];
    request = call_of(random, like, r, n, buffers[static_cast<std::size_t>(r)]);
    request.program =
        r == spoiled
            ? program
            : std::make_shared<const Program>(schedule[static_cast<std::size_t>(r)].program);
    const Task& task = tasks.emplace_back(request);
    try {
      Scheduled::require_fit(ranks.group(r), task);
    } catch (const CollectiveFailure&) {
      ++counts.refused;
      return;
    }
    operations.push_back(std::make_unique<Scheduled>(ranks.group(r), task, 1));
  }
  for (const auto& operation : operations) operation->start();
  std::vector<bool> done(static_cast<std::size_t>(n), false);
  std::vector<std::byte> before(ranks.slots_bytes() * static_cast<std::size_t>(n));
  bool progressed = true;
  for (int turn = 0; progressed && turn < kMostTurns; ++turn) {
    progressed = false;
    for (int r = 0; r < n; ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (done[index]) continue;
      const auto slots = [&](const auto& act) {
        for (const Member each : ranks.group(0).members())
          if (each.index() != r) act(before.data() + each.at() * ranks.slots_bytes(), each);
      };
      if (r == spoiled)
        slots([&](std::byte* copy, Member each) {
          std::memcpy(copy, ranks.slots(each), ranks.slots_bytes());
        });
      const State state = operations[index]->advance();
      if (r == spoiled)
        slots([&](std::byte* copy, Member each) {  // it writes none of its peers'
          CHECK(std::memcmp(copy, ranks.slots(each), ranks.slots_bytes()) == 0);
        });
      done[index] = state == State::kDone;
      progressed = progressed || state != State::kBlocked;
    }
  }
  for (const Buffers& own : buffers) CHECK(is_as_given(own));
  ++counts.run;
  counts.finished += std::count(done.begin(), done.end(), true) == n;
  if (spoiled < 0) CHECK(std::count(done.begin(), done.end(), true) == n);
  ranks.reset();
}

}  // namespace

int main(int arguments, char** argument) {
  const double seconds = arguments > 1 ? std::atof(argument[1]) : 5;
  const std::uint64_t seed = arguments > 2 ? std::strtoull(argument[2], nullptr, 10) : 1;
  const auto schedules = read_programs("programs.txt");
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
