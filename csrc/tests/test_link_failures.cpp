// Whom a failure between hosts names: ranks that stop amid a call.
#include <cstdio>
#include <string>

#include "engine/far/messenger.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/far_programs.h"
#include "tests/host_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// Both have called, and then nothing of the data comes through.
void who_stops_amid_a_call_is_named(const std::vector<HostSchedule>& schedules) {
  for (const bool collective : {true, false}) {
    FakeNetwork network(2, {});
    HostRanks ranks({1, 1}, network);
    const auto group = ranks.make_communicators(0.5);
    network.hold_from(collective ? kLaneFirst : kLanePair);
    ranks.run([&](int r) {
      std::vector<float> x(100000, 1.0F);
      Request request = pair(OpKind::kRecv, x, 1 - r);
      if (collective) {
        request = all_reduce(x);
        for (const HostSchedule& each : schedules)
          if (each.programs.size() == 2 && each.first().algorithm == "direct")
            request.program = each.programs[static_cast<std::size_t>(r)];
      } else if (r == 1) {
        request.kind = OpKind::kSend;
      }
      // What has been sent has left here, so a sender is through.
      const Failure failure =
          failure_of([&] { group[static_cast<std::size_t>(r)]->run(request, {}); });
      if (!collective && r == 1) return;
      CHECK(failure.kind == FailureKind::kTimeout);
      CHECK(contains(failure.message, "rank(s) 0 have called it but not finished") ||
            contains(failure.message, "rank(s) 1 have called it but not finished"));
    });
    ranks.run([&](int r) { group[static_cast<std::size_t>(r)]->close(); });
  }
}

// The receiver has called, and does not take what is sent.
void who_does_not_take_a_message_is_named() {
  int blocked = 0;
  for (unsigned seed = 0; seed < 6; ++seed) {
    FakeNetwork network(2, {seed, 0, true});  // of some messages the memory is read late
    HostRanks ranks({1, 1}, network);
    const auto group = ranks.make_communicators(60);
    network.hold_from(kLanePair);
    group[0]->set_timeout(0.3);
    ranks.run([&](int r) {
      std::vector<float> x(100000, 1.0F);
      const Request request = pair(r == 0 ? OpKind::kSend : OpKind::kRecv, x, 1 - r);
      const Failure failure =
          failure_of([&] { group[static_cast<std::size_t>(r)]->run(request, {}); });
      if (r == 0) network.release();
      if (r == 1 || failure.kind == FailureKind::kNone) return;
      ++blocked;
      CHECK(failure.kind == FailureKind::kTimeout);
      CHECK(contains(failure.message, "rank(s) 1 have called it but not finished"));
    });
    ranks.run([&](int r) { group[static_cast<std::size_t>(r)]->close(); });
  }
  CHECK(blocked > 0);
}

}  // namespace

int main() {
  who_stops_amid_a_call_is_named(read_host_schedules("programs.txt", OpKind::kAllReduce));
  who_does_not_take_a_message_is_named();
  std::puts("failures of links: passed");
}
