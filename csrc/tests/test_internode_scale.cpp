// Many ranks as threads, on hosts joined by a fake network; `make scale` writes their plans.
//
//   test_internode_scale FILE...     one schedule a file (program_text.h)
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <cstdio>

#include "tests/check.h"
#include "tests/host_ranks.h"
#include "tests/internode_programs.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

constexpr std::size_t kCount = 20011;

// A rank's data area is committed as a whole, 4 MiB: here only what so many ranks use.
void commit_on_use(Group& group) {
  std::byte* data = group.data(group.me());
  const auto first = (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + group.data_bytes()) / kPage * kPage;
  CHECK(madvise(reinterpret_cast<void*>(first), end - first, MADV_REMOVE) == 0);
}

void run(const HostSchedule& schedule) {
  const auto start = std::chrono::steady_clock::now();
  const int n = static_cast<int>(schedule.programs.size());
  FakeNetwork network(n, {1, 0, false, true});
  HostRanks ranks(schedule.host_sizes, network);
  for (int r = 0; r < n; ++r) commit_on_use(*ranks.group(r));
  const auto group = ranks.make_communicators(600);
  const std::vector<float> sum = sum_in_order(n, kCount, 1);
  ranks.run([&](int r) {
    const auto at = static_cast<std::size_t>(r);
    for (int repeat = 0; repeat < 2; ++repeat) {
      std::vector<float> x = order_dependent(r, kCount, 1);
      group[at]->run(all_reduce(x, schedule.programs[at]), {});
      CHECK(same_bits(x, sum));
    }
    group[at]->close();  // while others are not through
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  std::printf(
      "%-20s %5d ranks on %3zu hosts: the same bits, twice; %llu messages, %.1f s, %.1f GiB\n",
      schedule.first().algorithm.c_str(), n, schedule.host_sizes.size(),
      static_cast<unsigned long long>(network.delivered()), took.count(),
      static_cast<double>(used.ru_maxrss) / (1 << 20));
  std::fflush(stdout);
}

}  // namespace

int main(int arguments, char** argument) {
  CHECK(arguments > 1);
  mallopt(M_ARENA_MAX, 4);  // what one thread has freed serves the others
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;  // a segment a rank
  setrlimit(RLIMIT_NOFILE, &files);
  for (int i = 1; i < arguments; ++i)
    for (const HostSchedule& each : read_host_schedules(argument[i], OpKind::kAllReduce)) run(each);
  std::puts("scale: passed");
}
