// Which cores ranks may use, and what threads do that wait where another rank runs.
#include "engine/cores.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/inside.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using std::chrono::milliseconds;

cpu_set_t set_of(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

bool have_cores(const std::vector<std::vector<int>>& allowed, int more = 0) {
  std::vector<cpu_set_t> sets;
  for (const auto& each : allowed) sets.push_back(set_of(each));
  return each_has_a_core(sets, more);
}

void ranks_have_cores_by_the_masks_of_all() {
  CHECK(have_cores({{0}}));
  CHECK(have_cores({{0}, {1}}));        // each is pinned
  CHECK(have_cores({{0, 1}, {0, 1}}));  // none is
  CHECK(!have_cores({{0}, {0}}));
  CHECK(!have_cores({{0, 1}, {0, 1}, {0, 1}}));
  CHECK(have_cores({{0, 1}, {0}}));              // the first must take 1
  CHECK(!have_cores({{0, 1, 2, 3}, {7}, {7}}));  // cores enough, but not for two of them
  CHECK(have_cores({{0, 1}, {1, 2}, {2, 0}}));
  CHECK(have_cores({{0, 1}, {0, 2}, {0, 3}, {0}}));  // all change theirs, one after the other
  CHECK(!have_cores({{5, 6}, {5, 6}, {5, 6}, {1, 2, 3, 4}}));
  CHECK(have_cores({{1000, 1023}, {1023}}));
  CHECK(!have_cores({{}, {1}}));
  // Of others only their number is known: they run where these may.
  CHECK(!have_cores({{0}, {1}}, 1));
  CHECK(have_cores({{0, 1, 2}}, 2));
  std::vector<std::vector<int>> many(kMaxMembers);
  for (int rank = 0; rank < kMaxMembers; ++rank)
    for (int core = 0; core <= rank; ++core) many[static_cast<std::size_t>(rank)].push_back(core);
  CHECK(have_cores(many));
  many.back() = {0, 1};
  CHECK(!have_cores(many));
}

std::vector<int> own_cores() {
  std::vector<int> found;
  const std::optional<cpu_set_t> set = allowed_cores(0);
  CHECK(set);
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &*set)) found.push_back(core);
  return found;
}

void stay_on(const std::vector<int>& cores) {
  const cpu_set_t set = set_of(cores);
  CHECK(sched_setaffinity(0, sizeof(set), &set) == 0);
}

void a_move_leaves_the_mask_as_it_was(int one, int other) {
  stay_on({one});
  CHECK(!move_off(set_of({one})));  // it may not run elsewhere
  CHECK(own_cores() == std::vector<int>{one});
  stay_on({one, other});
  CHECK(move_off(set_of({one})));
  CHECK(own_cores() == std::vector<int>({one, other}));
  CHECK(!move_off(set_of({one, other})));
  CHECK(own_cores() == std::vector<int>({one, other}));
}

rusage spent() {
  rusage found{};
  CHECK(getrusage(RUSAGE_THREAD, &found) == 0);
  return found;
}

milliseconds cpu_time(const rusage& spent) {
  const auto of = [](const timeval& time) { return time.tv_sec * 1000 + time.tv_usec / 1000; };
  return milliseconds(of(spent.ru_utime) + of(spent.ru_stime));
}

// Each spins for half a millisecond where it does not know that the other needs its core.
void who_shares_a_core_gives_it_away(int core) {
  constexpr int kCalls = 200;
  const ThreadGroup group(2);
  std::atomic<long> took{0};
  group.run([&](int r) {
    CHECK(group[r]->group().may_spin());  // the group's ranks may use several
    stay_on({core});
    std::vector<float> x(10, 1.0F);
    const milliseconds before = cpu_time(spent());
    for (int i = 0; i < kCalls; ++i) group[r]->run(all_reduce(x), {});
    took += (cpu_time(spent()) - before).count();
  });
  std::printf("took %ld ms of CPU\n", took.load());
  CHECK(took < kCalls / 5);  // 0.2 ms for each, of both
}

// Returns whether the threads came apart within some calls.
bool come_apart(int one, int other) {
  const ThreadGroup group(2);
  std::atomic<int> ready{0};
  std::atomic<bool> apart{false};
  group.run([&](int r) {
    stay_on({one});
    ++ready;
    await([&] { return ready == 2; });
    std::vector<float> x(10, 1.0F);
    group[r]->run(all_reduce(x), {});  // tells the other where it is
    group[r]->run(all_reduce(x), {});
    stay_on({one, other});
    for (int i = 0; i < 20; ++i) {
      group[r]->run(all_reduce(x), {});
      Group& mine = group[r]->group();
      if (r == 0) apart = mine.mailbox(Member(0)).core != mine.mailbox(Member(1)).core;
    }
    CHECK(own_cores() == std::vector<int>({one, other}));
  });
  return apart;
}

// Linux, too, takes them apart; but not within some microseconds.
void who_meets_a_peer_on_its_core_moves(int one, int other) {
  int apart = 0;
  for (int i = 0; i < 10; ++i) apart += come_apart(one, other) ? 1 : 0;
  std::printf("came apart in %d of 10\n", apart);
  CHECK(apart >= 6);
}

}  // namespace

int main() {
  ranks_have_cores_by_the_masks_of_all();
  const std::vector<int> cores = own_cores();
  if (cores.size() < 2) {
    std::puts("cores: passed; what takes two cores was left out");
    return 0;
  }
  std::thread([&] { a_move_leaves_the_mask_as_it_was(cores[0], cores[1]); }).join();
  who_shares_a_core_gives_it_away(cores[0]);
  who_meets_a_peer_on_its_core_moves(cores[0], cores[1]);
  std::puts("cores: passed");
}
