// The choice between two ways, with planted costs, as plain stores (the first way) and streaming
// ones have them. Whether caches cost what is planted here is for a machine that has them.
#include <functional>
#include <random>
#include <vector>

#include "engine/chooser.h"
#include "kernels/prefetching.h"
#include "tests/check.h"

using namespace pycollective;

namespace {

struct Costs {
  double plain, streaming;
  double of(bool second) const { return second ? streaming : plain; }
  double best() const { return std::min(plain, streaming); }
};
constexpr Costs kNear{1, 1.8};
constexpr Costs kFar{15, 1};
constexpr Costs kAlike{1, 1.1};

struct Seen {
  double time = 0;
  double best = 0;   // of the better kind alone
  int switches = 0;  // of the choice
};

// Calls that cost that much, give or take a tenth; one in a hundred is interrupted.
Seen write(Chooser& chooser, const Costs& costs, int calls, std::mt19937& random) {
  Seen seen;
  std::uniform_real_distribution<double> noise(0.9, 1.1);
  for (int i = 0; i < calls; ++i) {
    const bool before = chooser.chosen();
    const bool second = chooser.next();
    const double cost = costs.of(second) * noise(random);
    chooser.record(second, random() % 100 == 0 ? cost * 100 : cost);
    seen.time += cost;
    seen.best += costs.best();
    seen.switches += chooser.chosen() != before;
  }
  return seen;
}

void test_keeps_the_better_kind() {
  std::mt19937 random(1);
  for (const Costs& costs : {kNear, kFar, kAlike}) {
    Chooser chooser;
    CHECK(write(chooser, costs, 20, random).switches == (costs.plain > costs.streaming));
    const Seen seen = write(chooser, costs, 100000, random);
    CHECK(seen.switches == 0);
    CHECK(seen.time < (1 + 2.0 / Chooser::kCalls + 0.005) * seen.best);  // and noise
  }
}

void test_follows_a_flip_within_some_calls() {
  std::mt19937 random(2);
  Chooser chooser;
  write(chooser, kNear, 1000, random);
  for (int turn = 0; turn < 200; ++turn) {
    const bool far = turn % 2 == 0;
    const Costs& costs = far ? kFar : kNear;
    const int calls = 1 + static_cast<int>(random() % 3000);
    // To look at plain stores costs much where caches are far, so it takes longer to find them
    // good.
    const int found = far ? 16 : 20 * Chooser::kCalls / 4;
    write(chooser, costs, found, random);
    CHECK(chooser.chosen() == far);
    CHECK(write(chooser, costs, calls, random).switches == 0);
  }
}

// Calls within one tick of the clock cost nothing.
void test_goes_on_probing_where_nothing_is_measured() {
  Chooser chooser;
  int probes = 0;
  for (int i = 0; i < 10000; ++i) {
    const bool second = chooser.next();
    probes += second != chooser.chosen();
    chooser.record(second, 0);
  }
  CHECK(probes > 10000 / Chooser::kCalls && probes < 4 * 10000 / Chooser::kCalls);
}

void test_copies_for_peers() {
  std::vector<std::byte> from(20000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  for (const std::size_t bytes : {0, 1, 63, 64, 4095, 4096, 4097, 16384, 16385, 19000})
    for (const std::size_t skip : {0, 1, 16, 48, 64})
      for (const bool streams : {false, true})
        for (const NextRead next : {NextRead{}, NextRead{from.data(), from.size()}}) {
          std::vector<std::byte> to(from.size() + 64);
          std::vector<std::byte> want = to;
          std::copy_n(from.begin() + 3, bytes, want.begin() + static_cast<long>(skip));
          copy_for_peers(streams, to.data() + skip, from.data() + 3, bytes, next);
          CHECK(to == want);
        }
}

// Calls under way when the choice changes, and calls that went as nobody had planned.
void test_heeds_which_way_a_call_went() {
  Chooser chooser;
  for (int i = 0; i < 5; ++i) chooser.record(false, 2);
  CHECK(chooser.next());
  for (int i = 0; i < 2; ++i) chooser.record(true, 3);
  for (int i = 0; i < 10; ++i) chooser.record(true, 1e-9);  // nobody asked for that way
  CHECK(!chooser.chosen() && !chooser.next());
  for (int i = 0; i < 2 * Chooser::kCalls; ++i) chooser.record(false, 2);
  CHECK(chooser.next());
  for (int i = 0; i < 10; ++i) chooser.record(false, 2);
  CHECK(chooser.next() && !chooser.chosen());  // the probe still has to come
  chooser.record(true, 1);
  chooser.record(true, 1);
  CHECK(chooser.chosen() && chooser.next());
}

}  // namespace

int main() {
  test_keeps_the_better_kind();
  test_follows_a_flip_within_some_calls();
  test_goes_on_probing_where_nothing_is_measured();
  test_copies_for_peers();
  test_heeds_which_way_a_call_went();
  std::puts("chooser: passed");
}
