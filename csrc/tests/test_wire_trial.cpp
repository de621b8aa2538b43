// Whether packing pays: what ranks make of what each of them measured.
#include "engine/plans/wire_trial.h"

#include <cstdio>

#include "tests/check.h"
#include "tests/host_ranks.h"
#include "tests/internode_programs.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// All ranks go on by the slowest one's times.
void ranks_agree_on_what_they_measured(const std::vector<HostSchedule>& schedules) {
  FakeNetwork network(3, {});
  HostRanks ranks({1, 1, 1}, network);
  const auto group = ranks.make_communicators(20);
  // By rank: the seconds raw and packed. The slowest raw is 5, the slowest packed 3; of the fastest
  // it would be the other way round.
  const double seconds[3][2] = {{1, 2}, {5, 3}, {1, 2}};
  ranks.run([&](int r) {
    const auto at = static_cast<std::size_t>(r);
    for (const int turned : {0, 1}) {
      const Request request;
      Task call(request);
      call.trial = std::make_shared<WireTrial>();
      for (; call.call_of_trial < WireTrial::kTries; ++call.call_of_trial) {
        CHECK(call.trial->packs(call.call_of_trial) == (call.call_of_trial % 2 == 1));
        const double slow_start = call.call_of_trial < 2 ? 9 : 0;  // the best of the tries counts
        call.trial->took(call.call_of_trial,
                         seconds[r][(call.call_of_trial + turned) % 2] + slow_start);
      }
      auto agreement = WireTrial::before(call);
      CHECK(agreement && agreement->kind == OpKind::kAllReduce);
      agreement->program = program_of(schedules, "ring", 3, 3, r);
      group[at]->run(*agreement, {});
      CHECK(call.trial->packs(WireTrial::kTries) == (turned == 0));
      ++call.call_of_trial;
      CHECK(!WireTrial::before(call));
    }
    group[at]->close();
  });
}

}  // namespace

int main() {
  ranks_agree_on_what_they_measured(read_host_schedules("programs.txt", OpKind::kAllReduce));
  std::puts("wire trial: passed");
}
