// Interleavings of ranks of several hosts, explored from seeds. One thread takes each step of each
// rank in an order drawn from the seed, so a failure can be reproduced (except for the messenger's
// few waits, which go by the clock).
//
//   test_internode_explored [seeds [first]]
//
// In each run a rank may die, or call something else. Then every other rank ends with the right
// bits or with an error that names the culprit, and has written only what it may.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "engine/any_operation.h"
#include "engine/internode/messenger.h"
#include "engine/watch.h"
#include "tests/check.h"
#include "tests/host_ranks.h"
#include "tests/internode_programs.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// A run that takes longer hangs; the messenger's own waits are 0.5 s at most.
constexpr std::chrono::seconds kLongestRun{20};

enum class Trouble { kNone, kDeath, kMismatch, kAbort };

// What a Communicator does for a rank, step by step.
class Walker {
 public:
  Walker(Group& group, std::shared_ptr<const Program> program, std::vector<float> x)
      : group_(group),
        x_(std::move(x)),
        before_(x_),
        request_(all_reduce(x_, std::move(program))) {}

  bool over() const { return done_ || failure_; }
  bool done() const { return done_; }
  const std::optional<Failure>& failure() const { return failure_; }
  const std::vector<float>& output() const { return x_; }
  const std::vector<float>& before() const { return before_; }

  void step() {
    try {
      if (operation_ == nullptr) {
        operation_ = &room_.make(group_, task_, 1);
        operation_->start();
        return;
      }
      done_ = operation_->advance() == State::kDone;
      if (!done_) Watch::throw_if_failed(*operation_);
      if (++steps_ % 64 == 0) operation_->compare_calls();
    } catch (const CollectiveFailure& error) {
      fail(error.failure());
    }
    if (over()) room_.end();
  }

  void fail(const Failure& failure) {
    failure_ = failure;
    const auto notice = group_.messenger()->notice();
    const bool first = group_.failure().kind == FailureKind::kNone &&
                       !(notice && notice->reporter != group_.world().rank);
    group_.fail(failure.kind, failure.message);
    group_.messenger()->tell({failure.kind, group_.world().rank, failure.message}, first);
  }

 private:
  Group& group_;
  std::vector<float> x_;
  const std::vector<float> before_;
  Request request_;
  const Task task_{request_};
  AnyOperation room_;
  Operation* operation_ = nullptr;
  int steps_ = 0;
  bool done_ = false;
  std::optional<Failure> failure_;
};

struct Tally {
  int done = 0;
  int failed = 0;
};

void explore(const HostSchedule& schedule, unsigned seed, Tally& tally) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t end) { return static_cast<int>(random() % end); };
  const int n = static_cast<int>(schedule.programs.size());
  const auto trouble = static_cast<Trouble>(below(4));
  const int culprit = below(static_cast<std::size_t>(n));
  int until_trouble = below(40 * static_cast<std::size_t>(n));
  const std::size_t counts[] = {0, 7, 600, 2100, 40000};
  const std::size_t count = counts[below(5)];

  FakeNetwork network(n, {seed, below(9), false, true});
  HostRanks ranks(schedule.host_sizes, network, std::size_t{256} << 10);
  std::vector<std::unique_ptr<Walker>> walkers;
  for (int r = 0; r < n; ++r) {
    const bool differs = trouble == Trouble::kMismatch && r == culprit;
    walkers.push_back(std::make_unique<Walker>(*ranks.group(r),
                                               schedule.programs[static_cast<std::size_t>(r)],
                                               order_dependent(r, count + differs, seed)));
  }
  const auto start = std::chrono::steady_clock::now();
  bool dead = false;
  std::vector<int> left;
  do {
    left.clear();
    for (int r = 0; r < n; ++r)
      if (!walkers[static_cast<std::size_t>(r)]->over() && !(dead && r == culprit))
        left.push_back(r);
    if (left.empty()) break;
    const int r = left[static_cast<std::size_t>(below(left.size()))];
    for (int burst = 1 + below(4); burst > 0 && !walkers[static_cast<std::size_t>(r)]->over();
         --burst)
      walkers[static_cast<std::size_t>(r)]->step();
    if (until_trouble-- == 0 && !walkers[static_cast<std::size_t>(culprit)]->over()) {
      if (trouble == Trouble::kDeath) {
        dead = true;
        network.kill(culprit);
        // On its own host a pidfd would tell. Threads have none, so it is told here.
        for (int peer = 0; peer < n; ++peer) {
          const auto& local = ranks.group(culprit)->world().local_ranks;
          Walker& other = *walkers[static_cast<std::size_t>(peer)];
          if (peer == culprit || other.over() ||
              std::find(local.begin(), local.end(), peer) == local.end())
            continue;
          other.fail({FailureKind::kPeerFailure, peer, OpKind::kAllReduce, 1,
                      "rank " + std::to_string(culprit) + " died"});
        }
      } else if (trouble == Trouble::kAbort) {
        walkers[static_cast<std::size_t>(culprit)]->fail(
            {FailureKind::kAborted, culprit, OpKind::kAllReduce, 1, "enough"});
      }
    }
    if (std::chrono::steady_clock::now() - start > kLongestRun) {
      std::fprintf(stderr, "seed %u stands still\n", seed);
      std::abort();
    }
  } while (true);

  const std::vector<float> sum = sum_in_order(n, count, seed);
  for (int r = 0; r < n; ++r) {
    const Walker& each = *walkers[static_cast<std::size_t>(r)];
    if (dead && r == culprit) continue;
    if (each.done()) {
      ++tally.done;
      // Without data a rank needs none but those that it exchanges calls with.
      CHECK((trouble != Trouble::kMismatch || count == 0) && same_bits(each.output(), sum));
      continue;
    }
    ++tally.failed;
    const Failure& failure = *each.failure();
    switch (trouble) {
      case Trouble::kNone:
        CHECK(false);
        break;
      case Trouble::kDeath:
        CHECK(failure.kind == FailureKind::kPeerFailure &&
              failure.message.find("rank " + std::to_string(culprit) + " died") == 0);
        break;
      case Trouble::kMismatch:
        CHECK(failure.kind == FailureKind::kMismatch &&
              failure.message.find("rank " + std::to_string(culprit) + " ") != std::string::npos);
        CHECK(same_bits(each.output(), each.before()));
        break;
      case Trouble::kAbort:
        CHECK(failure.kind == FailureKind::kAborted && failure.message.find("enough") == 0);
        break;
    }
  }
  walkers.clear();
  for (int r = 0; r < n; ++r) ranks.group(r)->leave();
}

}  // namespace

int main(int arguments, char** argument) {
  const unsigned seeds = arguments > 1 ? static_cast<unsigned>(std::atoi(argument[1])) : 300;
  const unsigned first = arguments > 2 ? static_cast<unsigned>(std::atoi(argument[2])) : 0;
  const auto schedules = read_host_schedules("programs.txt", OpKind::kAllReduce);
  Tally tally;
  for (unsigned seed = first; seed < first + seeds; ++seed) {
    if (seeds == 1 || seed % 50 == 0) std::fprintf(stderr, "seeds from %u on\n", seed);
    explore(schedules[seed % schedules.size()], seed, tally);
  }
  CHECK(seeds < 100 || (tally.done > 0 && tally.failed > 0));
  std::printf("internode, explored: passed; %d ranks ended well, %d with a cause\n", tally.done,
              tally.failed);
}
