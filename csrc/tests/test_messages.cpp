// Messages with tags, from named ranks and from any, on one host and between hosts, in orders drawn
// from seeds.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <string>

#include "engine/operations/point_to_point.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/messages.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// For each pair, both ways: messages with one tag arrive in order, in whatever order tags are asked
// for.
void tags_in_any_order(unsigned seed) {
  constexpr int kTags = 5;
  constexpr std::size_t kSizes[] = {0, 1, 17, 2049, 9000, 25000};
  constexpr int kMessages = 12;
  everywhere(3, [&](Communicator& comm, int rank) {
    struct Planned {
      int peer, tag, turn;
      std::vector<float> x;
    };
    // Both sides draw the messages from the same seed.
    const auto plan = [&](int from, int to) {
      std::mt19937 draw(seed * 100 + static_cast<unsigned>(from * 10 + to));
      std::vector<Planned> messages;
      int turns[kTags] = {};
      for (int i = 0; i < kMessages; ++i) {
        const int tag = static_cast<int>(draw() % kTags);
        const std::size_t count = kSizes[draw() % std::size(kSizes)];
        messages.push_back({to, tag, turns[tag], message(from, to, tag, turns[tag], count)});
        ++turns[tag];
      }
      return messages;
    };
    std::vector<Planned> sent;
    std::vector<Planned> wanted;
    for (int peer = 0; peer < comm.size(); ++peer) {
      if (peer == rank) continue;
      for (Planned& each : plan(rank, peer)) sent.push_back(std::move(each));
      for (Planned& each : plan(peer, rank)) {
        each.peer = peer;
        wanted.push_back(std::move(each));
      }
    }
    std::mt19937 draw(seed + static_cast<unsigned>(rank));
    std::shuffle(wanted.begin(), wanted.end(), draw);
    std::vector<std::shared_ptr<Work>> works;
    for (Planned& each : sent)
      works.push_back(comm.submit(tagged(OpKind::kSend, each.x, each.peer, each.tag), nullptr));
    // The order of the tags is drawn; messages of one tag are received in order.
    std::map<std::pair<int, int>, std::vector<Planned*>> streams;
    for (Planned& each : wanted) streams[{each.peer, each.tag}].push_back(&each);
    for (auto& [subject, stream] : streams)
      std::sort(stream.begin(), stream.end(),
                [](const Planned* a, const Planned* b) { return a->turn < b->turn; });
    std::vector<std::vector<float>> got(wanted.size());
    std::vector<const Planned*> meant;
    for (const Planned& each : wanted) {
      auto& stream = streams[{each.peer, each.tag}];
      Planned* next = stream.front();
      stream.erase(stream.begin());
      std::vector<float>& x = got[meant.size()];
      x.assign(next->x.size(), -1.0F);
      meant.push_back(next);
      works.push_back(comm.submit(tagged(OpKind::kRecv, x, next->peer, next->tag), nullptr));
    }
    std::shuffle(works.begin(), works.end(), draw);
    for (const auto& work : works) CHECK(work->wait(30, {}));
    for (std::size_t i = 0; i < meant.size(); ++i) CHECK(got[i] == meant[i]->x);
  });
}

// A receive that is called first does not hold up a message that comes first, either way.
void tags_do_not_wait_for_each_other(std::size_t count) {
  everywhere(2, [&](Communicator& comm, int rank) {
    std::vector<float> one = message(0, 1, 1, 0, count);
    std::vector<float> two = message(0, 1, 2, 0, count);
    std::vector<float> none;
    if (rank == 0) {
      comm.run(tagged(OpKind::kSend, one, 1, 1), {});
      comm.run(tagged(OpKind::kRecv, none, 1, 9), {});
      const auto first = comm.submit(tagged(OpKind::kSend, one, 1, 1), nullptr);
      const auto second = comm.submit(tagged(OpKind::kSend, two, 1, 2), nullptr);
      CHECK(second->wait(10, {}));
      CHECK(!first->done());
      comm.run(tagged(OpKind::kSend, two, 1, 2), {});
      CHECK(first->wait(10, {}));
      return;
    }
    std::vector<float> x(count);
    std::vector<float> y(count);
    const auto late = comm.submit(tagged(OpKind::kRecv, y, 0, 2), nullptr);
    const auto early = comm.submit(tagged(OpKind::kRecv, x, 0, 1), nullptr);
    CHECK(early->wait(10, {}));
    CHECK(x == one && !late->done());
    comm.run(tagged(OpKind::kSend, none, 0, 9), {});
    CHECK(late->wait(10, {}));
    CHECK(y == two);
    comm.run(tagged(OpKind::kRecv, y, 0, 2), {});
    comm.run(tagged(OpKind::kRecv, x, 0, 1), {});
    CHECK(y == two && x == one);
  });
}

// As many tags at once as there are announcements can be received in any order, more in theirs.
void many_tags_at_once() {
  const int most = static_cast<int>(kUserAnnouncements);
  for (const auto& [tags, backwards] : {std::pair{most, true}, std::pair{2 * most + 3, false}})
    everywhere(2, [tags = tags, backwards = backwards](Communicator& comm, int rank) {
      std::vector<std::vector<float>> x;
      std::vector<std::shared_ptr<Work>> works;
      for (int tag = 0; rank == 0 && tag < tags; ++tag)
        x.push_back(message(0, 1, tag, 0, tag % 50 == 3 ? 2000 : 10));
      for (int tag = 0; rank == 0 && tag < tags; ++tag)
        works.push_back(
            comm.submit(tagged(OpKind::kSend, x[static_cast<std::size_t>(tag)], 1, tag), nullptr));
      for (int i = 0; rank == 1 && i < tags; ++i) {
        const int tag = backwards ? tags - 1 - i : i;
        std::vector<float> got(tag % 50 == 3 ? 2000 : 10);
        comm.run(tagged(OpKind::kRecv, got, 0, tag), {});
        CHECK(got == message(0, 1, tag, 0, got.size()));
      }
      for (const auto& work : works) CHECK(work->wait(30, {}));
    });
}

void from_any_rank(std::size_t count) {
  everywhere(4, [&](Communicator& comm, int rank) {
    constexpr int kTurns = 3;
    if (rank != 0) {
      for (int turn = 0; turn < kTurns; ++turn) {
        std::vector<float> x = message(rank, 0, 4, turn, count);
        comm.run(tagged(OpKind::kSend, x, 0, 4), {});
      }
      return;
    }
    int turns[4] = {};
    for (int i = 0; i < kTurns * 3; ++i) {
      std::vector<float> x(count, -1.0F);
      Request request = tagged(OpKind::kRecv, x, kAnySource, 4);
      int source = -7;
      if (i % 2 == 0) {
        request.source = &source;
        comm.run(request, {});
      } else {
        const auto work = comm.submit(request, nullptr);
        CHECK(work->wait(30, {}));
        source = work->source();
      }
      CHECK(source > 0 && source < 4);
      CHECK(x == message(source, 0, 4, turns[source]++, count));
    }
    for (int source = 1; source < 4; ++source) CHECK(turns[source] == kTurns);
  });
}

// Receives take messages in the order of their calls, also receives from any rank.
void any_rank_takes_its_turn() {
  everywhere(3, [](Communicator& comm, int rank) {
    std::vector<float> none;
    const auto send = [&](int turn) {
      std::vector<float> x = message(rank, 0, 6, turn, 5);
      comm.run(tagged(OpKind::kSend, x, 0, 6), {});
    };
    if (rank == 1) {
      comm.run(tagged(OpKind::kRecv, none, 0, 1), {});
      for (int turn = 0; turn < 4; ++turn) send(turn);
      comm.run(tagged(OpKind::kSend, none, 0, 2), {});
      return;
    }
    if (rank == 2) {
      comm.run(tagged(OpKind::kRecv, none, 0, 1), {});
      return send(0);
    }
    const int from[] = {1, 1, kAnySource, 1, kAnySource};
    std::vector<std::vector<float>> got(5, std::vector<float>(5));
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < 5; ++i)
      works.push_back(comm.submit(tagged(OpKind::kRecv, got[i], from[i], 6), nullptr));
    comm.run(tagged(OpKind::kSend, none, 1, 1), {});
    comm.run(tagged(OpKind::kRecv, none, 1, 2), {});
    // Rank 1's four messages have come, in order, to the four receives that were called first.
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(works[i]->wait(10, {}));
      CHECK(works[i]->source() == 1 && got[i] == message(1, 0, 6, static_cast<int>(i), 5));
    }
    CHECK(!works[4]->done());
    comm.run(tagged(OpKind::kSend, none, 2, 1), {});
    CHECK(works[4]->wait(10, {}));
    CHECK(works[4]->source() == 2 && got[4] == message(2, 0, 6, 0, 5));
  });
}

void both_sides_see_a_mismatch() {
  for (const int source : {0, kAnySource})
    everywhere(2, [source](Communicator& comm, int rank) {
      std::vector<float> x(rank == 0 ? 30 : 31, 1.0F);
      const std::vector<float> before = x;
      const Request request =
          rank == 0 ? tagged(OpKind::kSend, x, 1, 3) : tagged(OpKind::kRecv, x, source, 3);
      const Failure failure = failure_of([&] { comm.run(request, {}); });
      CHECK(failure.kind == FailureKind::kMismatch);
      CHECK(contains(failure.message, "send(float32, count 30, tag 3)"));
      CHECK(contains(failure.message, "recv(float32, count 31, tag 3)"));
      CHECK(x == before);
    });
}

// A receive ignores a message with another tag, and its timeout names the sender.
void another_tag_is_not_taken() {
  everywhere(
      2,
      [](Communicator& comm, int rank) {
        std::vector<float> x(10, 1.0F);
        const Failure failure = failure_of([&] {
          comm.run(tagged(rank == 0 ? OpKind::kSend : OpKind::kRecv, x, 1 - rank, 10 + rank), {});
        });
        CHECK(failure.kind == FailureKind::kTimeout);
        CHECK(contains(failure.message, "have not called it"));
      },
      0.3);
}

// A receive from any rank goes on while any other rank is there, and fails once all have left.
void from_any_rank_that_is_left() {
  everywhere(3, [](Communicator& comm, int rank) {
    std::vector<float> x(10, 1.0F);
    if (rank == 2) return comm.close();
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      comm.run(tagged(OpKind::kSend, x, 0, 1), {});
      return comm.close();
    }
    Request request = tagged(OpKind::kRecv, x, kAnySource, 1);
    comm.run(request, {});
    const Failure failure = failure_of([&] { comm.run(request, {}); });
    CHECK(failure.kind == FailureKind::kPeerFailure);
    CHECK(contains(failure.message, "closed their communicators"));
  });
}

void from_any_rank_and_one_dies() {
  FakeNetwork network(3, {5, 1, false, true});
  HostGroup group({1, 1, 1}, network, 20);
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    auto& comm = *group[r];
    if (r != 0) {
      comm.run(tagged(OpKind::kSend, x, 0, 1), {});
      if (r == 2) network.kill(2);
      return;
    }
    const Request request = tagged(OpKind::kRecv, x, kAnySource, 1);
    const auto start = std::chrono::steady_clock::now();
    const Failure failure = failure_of([&] {
      for (int i = 0; i < 3; ++i) comm.run(request, {});
    });
    CHECK(failure.kind == FailureKind::kPeerFailure);
    CHECK(contains(failure.message, "rank 2"));
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  });
  group.close();
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seeds = argc > 1 ? static_cast<unsigned>(std::stoul(argv[1])) : 4;
  for (unsigned seed = 1; seed <= seeds; ++seed) tags_in_any_order(seed);
  for (const std::size_t count : {1, 2049, 30000}) tags_do_not_wait_for_each_other(count);
  many_tags_at_once();
  for (const std::size_t count : {0, 5, 30000}) from_any_rank(count);
  any_rank_takes_its_turn();
  both_sides_see_a_mismatch();
  another_tag_is_not_taken();
  from_any_rank_that_is_left();
  from_any_rank_and_one_dies();
  std::puts("messages: passed");
  return 0;
}
