// Operations between hosts over a fake network, with ranks as threads: bits, failures, memory.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <thread>

#include "engine/any_operation.h"
#include "engine/internode/messenger.h"
#include "engine/watch.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/host_ranks.h"
#include "tests/internode_programs.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// Each call reads its own window of the ranks' numbers, so that stale data of an earlier call are
// wrong.
std::vector<float> window(const std::vector<float>& numbers, std::size_t begin, std::size_t count) {
  return {numbers.data() + begin, numbers.data() + begin + count};
}

// Small data areas, so that chunks reuse slots; and TSan would take minutes for larger ones.
#if defined(__SANITIZE_THREAD__)
constexpr std::size_t kMost = 50003, kRoom = std::size_t{128} << 10;
#else
constexpr std::size_t kMost = 400003, kRoom = 0;
#endif

void every_algorithm_gives_the_same_bits(const std::vector<HostSchedule>& schedules) {
  constexpr std::size_t kCounts[] = {0, 1, 100, 1500, 20011, kMost};
  const std::size_t longest = kMost + 2 * std::size(kCounts) * schedules.size();
  struct Input {
    std::vector<std::vector<float>> leaves;
    std::vector<float> sum;
  };
  std::map<int, Input> of_ranks;  // made once: under a sanitizer they take longer than the calls
  unsigned seed = 0;
  for (const HostSchedule& schedule : schedules) {
    ++seed;
    const int n = static_cast<int>(schedule.programs.size());
    const std::size_t first_place = 2 * std::size(kCounts) * (seed - 1);
    std::vector<std::vector<float>>& leaves = of_ranks[n].leaves;
    std::vector<float>& sum = of_ranks[n].sum;
    if (leaves.empty()) {
      for (int r = 0; r < n; ++r) leaves.push_back(order_dependent(r, longest, seed));
      sum = sum_in_order(leaves);
    }
    FakeNetwork network(n, {seed, static_cast<int>(seed % 7), seed % 2 == 0, true});
    HostGroup group(schedule.host_sizes, network, 8, kRoom);
    group.run([&](int r) {
      const auto at = static_cast<std::size_t>(r);
      std::size_t place = first_place;
      for (const std::size_t count : kCounts) {
        const std::size_t next = place + 1;
        std::vector<float> x = window(leaves[at], place, count);
        std::vector<float> y = window(leaves[at], next, count);
        // Two at once, the second behind the first, which is asynchronous; one of them packed.
        Request raw = all_reduce(x, schedule.programs[at]);
        Request packed = all_reduce(y, schedule.programs[at]);
        raw.wire = Wire::kRaw;
        packed.wire = Wire::kExact;
        const auto first = group[r]->submit(raw, nullptr);
        group[r]->run(packed, {});
        CHECK(first->wait(30, {}));
        CHECK(same_bits(x, window(sum, place, count)));
        CHECK(same_bits(y, window(sum, next, count)));
        place += 2;
      }
      group[r]->close();
    });
  }
}

void messages_of_pairs() {
  FakeNetwork network(2, {7, 3, true, true});
  HostGroup group({1, 1}, network);
  group.run([&](int r) {
    for (const std::size_t count : {0, 1, 2000, 2049, 100000}) {
      std::vector<float> sent = order_dependent(r, count, 3);
      std::vector<float> got(count);
      const auto sending = group[r]->submit(pair(OpKind::kSend, sent, 1 - r), nullptr);
      group[r]->run(pair(OpKind::kRecv, got, 1 - r), {});
      CHECK(sending->wait(30, {}));
      CHECK(same_bits(got, order_dependent(1 - r, count, 3)));
    }
    group[r]->close();
  });
}

// If one rank calls something else, all are told, and no output is touched.
void a_mismatch_touches_no_output(const std::vector<HostSchedule>& schedules) {
  for (const HostSchedule& schedule : schedules)
    for (const std::size_t count : {std::size_t{50}, kMost / 4}) {
      const int n = static_cast<int>(schedule.programs.size());
      FakeNetwork network(n, {3, 2, false, true});
      HostGroup group(schedule.host_sizes, network, 20);
      group.run([&](int r) {
        const auto at = static_cast<std::size_t>(r);
        std::vector<float> x = order_dependent(r, count + (r == n - 1), 5);
        const std::vector<float> before = x;
        const auto start = std::chrono::steady_clock::now();
        const Failure failure =
            failure_of([&] { group[r]->run(all_reduce(x, schedule.programs[at]), {}); });
        CHECK(failure.kind == FailureKind::kMismatch);
        CHECK(contains(failure.message, "count " + std::to_string(count)));
        CHECK(contains(failure.message, "count " + std::to_string(count + 1)));
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
        CHECK(same_bits(x, before));
      });
      group.close();
    }
}

// Ranks with different algorithms exchange different messages, and would wait for ever.
void different_algorithms_are_found_out(const std::vector<HostSchedule>& schedules) {
  FakeNetwork network(4, {1, 0, false, true});
  HostGroup group({1, 1, 1, 1}, network, 20);
  group.run([&](int r) {
    std::vector<float> x = order_dependent(r, 100, 5);
    const auto program = program_of(schedules, r == 1 ? "ring" : "tree", 4, 4, r);
    const Failure failure = failure_of([&] { group[r]->run(all_reduce(x, program), {}); });
    CHECK(failure.kind == FailureKind::kMismatch);
    CHECK(contains(failure.message, "algorithm ring") &&
          contains(failure.message, "algorithm tree"));
  });
  group.close();
}

// Messages that arrive after an operation has failed change nobody's memory.
void late_messages_change_nothing(const std::vector<HostSchedule>& schedules, bool late_reads) {
  for (const char* algorithm : {"direct", "ring", "tree", "halving_doubling", "hierarchical"}) {
    FakeNetwork network(4, {9, 0, late_reads, true});
    HostGroup group({2, 2}, network, 0.3, kRoom);
    network.hold_from(kLaneFirst);
    std::vector<std::vector<float>> outputs(4);
    std::vector<std::vector<float>> after(4);
    group.run([&](int r) {
      const auto at = static_cast<std::size_t>(r);
      const auto program = program_of(schedules, algorithm, 4, 2, r);
      outputs[at].assign(kMost, 0.0F);
      std::vector<float> input = order_dependent(r, kMost, 1);
      Request request = all_reduce(outputs[at], program);
      request.input = input.data();
      const Failure failure = failure_of([&] { group[r]->run(request, {}); });
      CHECK(failure.kind == FailureKind::kTimeout);
      after[at] = outputs[at];
      // The input is freed here: the sanitizer sees a late read.
    });
    network.release();
    for (int look = 0; look < 100; ++look)
      for (const auto& each : group) CHECK(each->failure() != nullptr);  // which polls
    for (std::size_t r = 0; r < 4; ++r) CHECK(same_bits(outputs[r], after[r]));
    group.close();
    for (std::size_t r = 0; r < 4; ++r) CHECK(same_bits(outputs[r], after[r]));
  }
}

// A transport that cannot cancel a message: all memory that it may touch stays alive.
void what_cannot_be_cancelled_is_kept(const std::vector<HostSchedule>& schedules) {
  FakeNetwork network(2, {9, 0, true, false});
  bool freed[2] = {false, false};
  {
    HostGroup group({1, 1}, network, 1);
    network.hold_from(kLaneFirst);
    group.run([&](int r) {
      // As in the bindings: the arrays live as long as `keep` does.
      std::shared_ptr<std::vector<float>> x(new std::vector<float>(300000, 1.0F),
                                            [&freed, r](std::vector<float>* it) {
                                              freed[r] = true;
                                              delete it;
                                            });
      Request request = all_reduce(*x, program_of(schedules, "direct", 2, 2, r));
      request.keep = x;
      CHECK(failure_of([&] { group[r]->run(request, {}); }).kind == FailureKind::kTimeout);
    });
    CHECK(!freed[0] && !freed[1]);
    group.close();
  }
  const auto before = network.delivered();
  network.release();
  for (int r = 0; r < 2; ++r)
    for (int look = 0; look < 10; ++look) network.link(r)->progress();  // it all arrives now
  CHECK(network.delivered() > before);
  CHECK(!freed[0] && !freed[1]);
}

void a_lost_rank_is_named_everywhere(const std::vector<HostSchedule>& schedules) {
  for (const char* algorithm : {"ring", "tree", "recursive_doubling", "direct"}) {
    FakeNetwork network(4, {5, 1, false, true});
    HostGroup group({1, 1, 1, 1}, network, 20);
    std::atomic<int> through{0};
    group.run([&](int r) {
      std::vector<float> x = order_dependent(r, 5000, 5);
      const auto program = program_of(schedules, algorithm, 4, 4, r);
      group[r]->run(all_reduce(x, program), {});
      ++through;
      while (through < 4) std::this_thread::yield();
      if (r == 3) return network.kill(3);
      const auto start = std::chrono::steady_clock::now();
      const Failure failure = failure_of([&] { group[r]->run(all_reduce(x, program), {}); });
      CHECK(failure.kind == FailureKind::kPeerFailure);
      CHECK(contains(failure.message, "rank 3 died"));
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    });
    group.close();
  }
}

// Several ranks leave at once while no rank polls: every goodbye is heard, and none waits.
void goodbyes_of_many_are_heard(const std::vector<HostSchedule>&) {
  FakeNetwork network(5, {5, 0, false, true, true});
  HostGroup group({1, 1, 1, 1, 1}, network, 20);
  group.run([&](int r) {
    if (r < 2) return;
    const auto start = std::chrono::steady_clock::now();
    std::atomic<bool> left{false};
    // Like Gloo's threads: messages fill posted receives although no rank polls.
    std::thread loop([&] {
      while (!left) {
        network.deliver(0);
        network.deliver(1);
        network.deliver(r);
        std::this_thread::yield();
      }
    });
    group[r]->close();
    left = true;
    loop.join();
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
    network.kill(r, false);
  });
  group.run([&](int r) {  // they need nothing of the others
    if (r >= 2) return;
    std::vector<float> x(10, 1.0F);
    // Longer than it takes to give up a rank that has gone without a goodbye.
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
    do {
      x[0] = std::chrono::steady_clock::now() < until ? 1.0F : 0.0F;
      group[r]->run(pair(r == 0 ? OpKind::kSend : OpKind::kRecv, x, 1 - r), {});
    } while (x[0] != 0.0F);
    CHECK(group[r]->failure() == nullptr);
  });
  group.close();
}

void a_goodbye_is_no_death(const std::vector<HostSchedule>& schedules) {
  FakeNetwork network(3, {5, 1, false, true});
  HostGroup group({1, 1, 1}, network, 20);
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    if (r == 2) {
      group[r]->close();
      return network.kill(2, false);
    }
    // Ranks that do not need it go on.
    if (r == 0) group[r]->run(pair(OpKind::kSend, x, 1), {});
    if (r == 1) group[r]->run(pair(OpKind::kRecv, x, 0), {});
    const auto program = program_of(schedules, "ring", 3, 3, r);
    const Failure failure = failure_of([&] { group[r]->run(all_reduce(x, program), {}); });
    CHECK(failure.kind == FailureKind::kPeerFailure);
    CHECK(contains(failure.message, "rank 2 closed its communicator before it finished"));
    CHECK(contains(failure.message, "it has made fewer calls"));
  });
  group.close();
}

void an_abort_reaches_who_has_not_called(const std::vector<HostSchedule>& schedules) {
  FakeNetwork network(4, {5, 1, false, true});
  HostGroup group({2, 2}, network, 20);
  group[0]->abort("enough");
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    const auto program = program_of(schedules, "tree", 4, 2, r);
    const Failure failure = failure_of([&] { group[r]->run(all_reduce(x, program), {}); });
    CHECK(failure.kind == FailureKind::kAborted && contains(failure.message, "enough"));
    group[r]->close();
  });
}

// Messages that a rank sent before it left count as come, however late the operation looks.
void what_has_come_is_not_missed() {
  using namespace std::chrono_literals;
  FakeNetwork network(2, {});
  Messenger mine(network.link(0), 7, 0, {1}, [] {});
  Messenger theirs(network.link(1), 7, 1, {0}, [] {});
  const auto poll_for = [&](std::chrono::milliseconds time) {
    const auto until = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < until && !mine.notice()) mine.poll();
  };
  std::vector<float> sent(100, 3.0F), got(100);
  float nothing = 0;
  MessageHandle come = mine.receive(1, kLaneFirst, got.data(), 400);
  mine.expect_call(1, kLaneCall);
  MessageHandle ticket = theirs.send(0, kLaneFirst, sent.data(), 400, 400);
  theirs.send_call(0, kLaneCall, theirs.make_call({}, 0));
  while (!theirs.done(ticket)) theirs.poll();
  std::thread leaving([&] { theirs.close(); });
  poll_for(600ms);
  CHECK(!mine.notice());
  CHECK(mine.done(come) && got == sent);
  CHECK(mine.take_call(1, kLaneCall, true));
  MessageHandle never = mine.receive(1, kLaneFirst + 1, &nothing, sizeof(nothing));
  poll_for(5s);
  CHECK(mine.notice() && contains(mine.notice()->report, "before it finished its part"));
  CHECK(!mine.done(never));
  mine.give_up({never}, nullptr);
  leaving.join();
  mine.close();
}

// A packed message's pieces that are longer than a block is raw, so that they are packed; each
// begins with its length.
std::vector<std::byte*> packed_pieces(std::byte* data, std::size_t bytes) {
  std::vector<std::byte*> pieces;
  std::uint32_t length = 0;
  for (std::size_t at = 0; at < bytes; at += sizeof(length) + length) {
    CHECK(at + sizeof(length) <= bytes);
    std::memcpy(&length, data + at, sizeof(length));
    if (length > 512) pieces.push_back(data + at);
  }
  return pieces;
}

// Another length, a mode that is none, another number of escaped elements.
constexpr int kBreaks = 7;
void break_piece(std::byte* piece, int how) {
  std::uint32_t length = 0;
  std::memcpy(&length, piece, sizeof(length));
  const std::uint32_t lengths[] = {0, length - 1, length + 1, 1U << 24, UINT32_MAX};
  if (how < 5) std::memcpy(piece, &lengths[how], sizeof(length));
  if (how == 5) piece[5] = std::byte{254};
  if (how == 6) piece[6] ^= std::byte{1};
}

// One piece of one message is broken on its way. Its receiver refuses it by its type, and every
// call ends. Returns how many pieces that message had; 0: no message was broken.
std::size_t break_one(const HostSchedule& schedule, int how, unsigned seed) {
  FakeNetwork network(static_cast<int>(schedule.programs.size()),
                      {seed, static_cast<int>(seed % 3), false, true});
  const HostGroup group(schedule.host_sizes, network, 20);
  std::atomic<int> to_pass{static_cast<int>(seed % 4)};  // messages, before the one that is broken
  std::atomic<std::size_t> pieces{0};
  std::atomic<int> from{-1}, to{-1}, refused{0};
  network.spoil_with([&](int sender, int receiver, std::byte* data, std::size_t bytes) {
    const std::vector<std::byte*> found = packed_pieces(data, bytes);
    if (found.empty() || to_pass-- != 0) return;
    break_piece(seed % 2 == 0 ? found.back() : found.front(), how);
    from = sender;
    to = receiver;
    pieces = found.size();
  });
  group.run([&](int r) {
    std::vector<float> x(20011);
    for (std::size_t i = 0; i < x.size(); ++i)  // they pack well
      x[i] = static_cast<float>(1 + (7 * i + static_cast<std::size_t>(r)) % 31);
    Request request = all_reduce(x, schedule.programs[static_cast<std::size_t>(r)]);
    request.wire = Wire::kExact;
    const Failure failure = failure_of([&] { group[r]->run(request, {}); });
    if (failure.message.empty()) return;  // it needed nothing of what was broken
    CHECK(failure.kind == FailureKind::kAborted);
    CHECK(failure.op == OpKind::kAllReduce && failure.sequence == 1);
    CHECK(contains(failure.message, "rank " + std::to_string(to) + " received from rank " +
                                        std::to_string(from) + " a packed message that no rank"));
    refused += r == to;
    CHECK(group[r]->failure() != nullptr);
  });
  CHECK(refused == (pieces == 0 ? 0 : 1));
  group.close();
  return pieces;
}

void broken_messages_are_refused(const std::vector<HostSchedule>& schedules) {
#if defined(__SANITIZE_THREAD__)
  constexpr int kStride = 3;  // and of 7 breaks each comes to other schedules
#else
  constexpr int kStride = 1;
#endif
  int turn = 0, broken = 0, of_several = 0;
  std::mt19937 random(1);
  for (const HostSchedule& schedule : schedules)
    for (int how = 0; how < kBreaks; ++how) {
      if (turn++ % kStride != 0) continue;
      const std::size_t pieces = break_one(schedule, how, static_cast<unsigned>(random()));
      broken += pieces != 0;
      of_several += pieces > 1;
    }
  CHECK(broken > 50 && of_several * kStride > 5);
}

// A rank may finish and leave before another one has looked again whether all have arrived.
void who_is_through_may_leave() {
  for (const auto& ranks : read_programs("programs.txt")) {
    const Program& first = ranks.front().program;
    if (first.kind != OpKind::kBroadcast || first.members != 3 || first.ranks != 3) continue;
    FakeNetwork network(3, {});
    HostRanks host({3}, network);
    std::vector<float> x(1000, 1.0F);
    const auto broadcast = [&](int r, std::vector<float>& data) {
      Request request = all_reduce(
          data, std::make_shared<const Program>(ranks[static_cast<std::size_t>(r)].program));
      request.kind = OpKind::kBroadcast;
      request.root = first.root;
      if (r != first.root) request.input = nullptr;
      return request;
    };
    const Request mine = broadcast(0, x);
    const Task task(mine);
    AnyOperation room;
    Operation& operation = room.make(*host.group(0), task, 1);
    operation.start();
    CHECK(operation.advance() == State::kBlocked);
    std::vector<std::thread> others;
    for (const int r : {1, 2})
      others.emplace_back([&, r] {
        std::vector<float> theirs(1000, 7.0F);
        const Request request = broadcast(r, theirs);
        const Task their_task(request);
        AnyOperation other;
        Operation& their_operation = other.make(*host.group(r), their_task, 1);
        their_operation.start();
        while (their_operation.advance() != State::kDone) std::this_thread::yield();
        other.end();
        host.group(r)->leave();
      });
    for (std::thread& each : others) each.join();
    Sight sight(operation.group());
    Watch(5).look(operation, sight);
    while (operation.advance() != State::kDone) std::this_thread::yield();
    CHECK(x[999] == 7.0F);
    room.end();
  }
}

}  // namespace

int main() {
  const auto schedules = read_host_schedules("programs.txt", OpKind::kAllReduce);
  every_algorithm_gives_the_same_bits(schedules);
  messages_of_pairs();
  who_is_through_may_leave();
  what_has_come_is_not_missed();
  a_mismatch_touches_no_output(schedules);
  different_algorithms_are_found_out(schedules);
  for (const bool late_reads : {false, true}) late_messages_change_nothing(schedules, late_reads);
  what_cannot_be_cancelled_is_kept(schedules);
  a_lost_rank_is_named_everywhere(schedules);
  a_goodbye_is_no_death(schedules);
  goodbyes_of_many_are_heard(schedules);
  an_abort_reaches_who_has_not_called(schedules);
  broken_messages_are_refused(schedules);
  std::puts("internode: passed");
}
