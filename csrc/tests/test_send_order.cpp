// Which sends begin if more wait than there are places or lanes.
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "engine/messages.h"
#include "tests/check.h"
#include "tests/messages.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// Seconds, more than anything here takes, also under TSan.
constexpr double kEnough = 60;

// Sends messages with these tags, in this order, and receives them in the order of `receives`.
void sent_and_received(const std::vector<int>& tags, const std::vector<std::size_t>& receives,
                       Communicator& comm, int rank) {
  const auto x = [&](std::size_t i) {
    // The short ones go with a call.
    return message(0, 1, tags[i], static_cast<int>(i), i % 5 == 1 ? 7 : 3000);
  };
  std::vector<std::vector<float>> sent;
  std::vector<std::shared_ptr<Work>> works;
  for (std::size_t i = 0; rank == 0 && i < tags.size(); ++i) sent.push_back(x(i));
  for (std::size_t i = 0; rank == 0 && i < tags.size(); ++i)
    works.push_back(comm.submit(tagged(OpKind::kSend, sent[i], 1, tags[i]), nullptr));
  for (const std::size_t i : receives) {
    if (rank != 1) break;
    const std::vector<float> right = x(i);
    std::vector<float> got(right.size());
    comm.run(tagged(OpKind::kRecv, got, 0, tags[i]), {});
    CHECK(got == right);
  }
  for (const auto& work : works) CHECK(work->wait(kEnough, {}));
}

// Places and lanes go to sends in the order of their calls. The progress thread looks at the lowest
// tag first: where that is the last call's, and it got the free place, the first would wait for
// ever. A tag's second send, which waits for the first, keeps its place in the order of all tags.
void sends_that_wait_begin_in_their_order() {
  std::vector<int> falling(3 * kAnnouncements), twice(falling.size());
  std::iota(falling.rbegin(), falling.rend(), 1);
  std::iota(twice.begin(), twice.end(), 0);
  twice[2] = twice[0];
  std::vector<std::size_t> in_order(falling.size());
  std::iota(in_order.begin(), in_order.end(), 0);
  for (const std::vector<int>& tags : {falling, twice})
    everywhere(
        2, [&](Communicator& comm, int rank) { sent_and_received(tags, in_order, comm, rank); },
        kEnough);
}

// Receives in any order that leaves messages of fewer tags than there are places before it; mostly
// the last one allowed.
std::vector<std::size_t> any_order(const std::vector<int>& tags, std::size_t places,
                                   std::mt19937& random) {
  std::vector<std::size_t> order;
  std::vector<bool> received(tags.size());
  while (order.size() < tags.size()) {
    std::vector<std::size_t> next;
    std::set<int> before;
    for (std::size_t i = 0; i < tags.size() && before.size() < places; ++i)
      if (!received[i] && before.insert(tags[i]).second) next.push_back(i);
    const bool last = random() % 4 != 0;
    order.push_back(last ? next.back() : next[random() % next.size()]);
    received[order.back()] = true;
  }
  return order;
}

void messages_are_received_in_any_order() {
  for (const unsigned seed : {1, 2, 3})
    everywhere(
        2,
        [seed](Communicator& comm, int rank) {
          std::mt19937 random(seed);
          std::vector<int> tags(4 * kAnnouncements);
          for (int& tag : tags) tag = static_cast<int>(random() % (2 * kAnnouncements));
          const bool near = comm.group().member_of(1 - rank).has_value();
          const std::size_t places = near ? kUserAnnouncements : kPairLanes - 1;
          sent_and_received(tags, any_order(tags, places, random), comm, rank);
        },
        kEnough);
}

}  // namespace

int main() {
  sends_that_wait_begin_in_their_order();
  messages_are_received_in_any_order();
  std::puts("order of sends: passed");
  return 0;
}
