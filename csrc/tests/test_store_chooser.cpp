// The choice between plain and streaming stores, with planted costs. Whether far caches cost what
// is planted here is for a machine that has them.
#include <functional>
#include <random>
#include <vector>

#include "engine/store_chooser.h"
#include "tests/check.h"

using namespace pycollective;

namespace {

struct Costs {
  double plain, streaming;
  double of(Stores kind) const { return kind == Stores::kPlain ? plain : streaming; }
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

// Pieces that cost that much, give or take a tenth; one in a hundred is interrupted.
Seen write(StoreChooser& chooser, const Costs& costs, int pieces, std::mt19937& random) {
  Seen seen;
  std::uniform_real_distribution<double> noise(0.9, 1.1);
  for (int i = 0; i < pieces; ++i) {
    const Stores before = chooser.chosen();
    const double cost = costs.of(chooser.next()) * noise(random);
    chooser.record(random() % 100 == 0 ? cost * 100 : cost);
    seen.time += cost;
    seen.best += costs.best();
    seen.switches += chooser.chosen() != before;
  }
  return seen;
}

void test_keeps_the_better_kind() {
  std::mt19937 random(1);
  for (const Costs& costs : {kNear, kFar, kAlike}) {
    StoreChooser chooser;
    CHECK(write(chooser, costs, 20, random).switches == (costs.plain > costs.streaming));
    const Seen seen = write(chooser, costs, 100000, random);
    CHECK(seen.switches == 0);
    CHECK(seen.time < (1 + 2.0 / StoreChooser::kPieces + 0.005) * seen.best);  // and noise
  }
}

void test_follows_a_flip_within_some_pieces() {
  std::mt19937 random(2);
  StoreChooser chooser;
  write(chooser, kNear, 1000, random);
  for (int turn = 0; turn < 200; ++turn) {
    const bool far = turn % 2 == 0;
    const Costs& costs = far ? kFar : kNear;
    const int pieces = 1 + static_cast<int>(random() % 3000);
    // To look at plain stores costs much where caches are far, so it takes longer to find them
    // good.
    const int found = far ? 16 : 20 * StoreChooser::kPieces / 4;
    write(chooser, costs, found, random);
    CHECK(chooser.chosen() == (far ? Stores::kStreaming : Stores::kPlain));
    CHECK(write(chooser, costs, pieces, random).switches == 0);
  }
}

// Pieces within one tick of the clock cost nothing.
void test_goes_on_probing_where_nothing_is_measured() {
  StoreChooser chooser;
  int probes = 0;
  for (int i = 0; i < 10000; ++i) {
    probes += chooser.next() != chooser.chosen();
    chooser.record(0);
  }
  CHECK(probes > 10000 / StoreChooser::kPieces);
}

void test_copies() {
  std::vector<std::byte> from(20000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 256);
  StoreChooser chooser;
  for (const std::size_t bytes : {0, 1, 63, 64, 4095, 4096, 4097, 16384, 16385, 19000})
    for (const std::size_t skip : {0, 1, 16, 48, 64}) {
      std::vector<std::byte> to(from.size() + 64);
      std::vector<std::byte> want = to;
      std::copy_n(from.begin() + 3, bytes, want.begin() + static_cast<long>(skip));
      for (int i = 0; i < 40; ++i) chooser.write(to.data() + skip, from.data() + 3, bytes);
      CHECK(to == want);
      std::fill(to.begin(), to.end(), std::byte{});
      copy_streaming(to.data() + skip, from.data() + 3, bytes);
      finish_stores();
      CHECK(to == want);
    }
}

}  // namespace

int main() {
  test_keeps_the_better_kind();
  test_follows_a_flip_within_some_pieces();
  test_goes_on_probing_where_nothing_is_measured();
  test_copies();
  std::puts("store chooser: passed");
}
