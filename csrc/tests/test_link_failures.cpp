// Whom a failure between hosts names: a rank that stops in a call, a rank that MPI has lost, and
// never a peer that is well.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/internode/messenger.h"
#include "mpi/link.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/fake_mpi.h"
#include "tests/host_ranks.h"
#include "tests/internode_programs.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using Outcome = Link::Outcome;

// Both have called, and then no data come through.
void who_stops_amid_a_call_is_named(const std::vector<HostSchedule>& schedules) {
  for (const bool collective : {true, false}) {
    FakeNetwork network(2, {});
    HostGroup group({1, 1}, network, 0.5);
    network.hold_from(collective ? kLaneFirst : kLanePair);
    group.run([&](int r) {
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
      // Its data have left, so a sender is done.
      const Failure failure = failure_of([&] { group[r]->run(request, {}); });
      if (!collective && r == 1) return;
      CHECK(failure.kind == FailureKind::kTimeout);
      CHECK(contains(failure.message, "rank(s) 0 have called it but not finished") ||
            contains(failure.message, "rank(s) 1 have called it but not finished"));
    });
    group.close();
  }
}

// The receiver has called, and does not take the message.
void who_does_not_take_a_message_is_named() {
  int blocked = 0;
  for (unsigned seed = 0; seed < 6; ++seed) {
    FakeNetwork network(2, {seed, 0, true});  // reads the memory of some messages late
    HostGroup group({1, 1}, network, 60);
    network.hold_from(kLanePair);
    group[0]->set_timeout(0.3);
    group.run([&](int r) {
      std::vector<float> x(100000, 1.0F);
      const Request request = pair(r == 0 ? OpKind::kSend : OpKind::kRecv, x, 1 - r);
      const Failure failure = failure_of([&] { group[r]->run(request, {}); });
      if (r == 0) network.release();
      if (r == 1 || failure.kind == FailureKind::kNone) return;
      ++blocked;
      CHECK(failure.kind == FailureKind::kTimeout);
      CHECK(contains(failure.message, "rank(s) 1 have called it but not finished"));
    });
    group.close();
  }
  CHECK(blocked > 0);
}

// The link of a rank that has no memory left but for its last words, or whose transport fails once
// `fails` is set.
class WithoutMemory final : public Link {
 public:
  explicit WithoutMemory(std::shared_ptr<Link> link) : link_(std::move(link)) {}
  std::atomic<bool> fails{false};
  Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool awaited) override {
    if (lane != kLaneControl) throw std::bad_alloc();
    return link_->send(rank, lane, data, bytes, awaited);
  }
  Transfer receive(int rank, int lane, void* data, std::size_t capacity) override {
    return link_->receive(rank, lane, data, capacity);
  }
  void progress() override {
    if (fails) throw std::runtime_error("no thread");
    link_->progress();
  }
  Outcome test(Transfer transfer) override { return link_->test(transfer); }
  void cancel(Transfer transfer) noexcept override { link_->cancel(transfer); }
  std::optional<Loss> lost() override { return link_->lost(); }
  bool wake_with(std::function<void()> wake) override { return link_->wake_with(std::move(wake)); }
  void close(bool quiet) noexcept override { link_->close(quiet); }

 private:
  const std::shared_ptr<Link> link_;
};

class RankWithoutMemory : private ThreadRanks {
 public:
  explicit RankWithoutMemory(FakeNetwork& network)
      : ThreadRanks({1, 1}), groups(make_groups(0, [&](int rank) -> std::shared_ptr<Link> {
          if (rank == 0) return link = std::make_shared<WithoutMemory>(network.link(rank));
          return network.link(rank);
        })) {}
  using ThreadRanks::run;
  std::shared_ptr<WithoutMemory> link;
  // Rank 0's transport fails where no operation sees it.
  void fail() {
    link->fails = true;
    messenger->poll();
  }
  std::vector<std::shared_ptr<Communicator>> make() {
    messenger = groups[0]->messenger();
    return make_communicators(std::move(groups), 20);
  }

 private:
  Messenger* messenger = nullptr;
  Groups groups;
};

void no_memory_is_no_death_of_a_peer() {
  FakeNetwork network(2, {});
  RankWithoutMemory ranks(network);
  const auto group = ranks.make();
  ranks.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    const Request request = pair(r == 0 ? OpKind::kSend : OpKind::kRecv, x, 1 - r);
    const Failure failure =
        failure_of([&] { group[static_cast<std::size_t>(r)]->run(request, {}); });
    CHECK(failure.kind == FailureKind::kAborted);
    CHECK(contains(failure.message, "rank 0 could not carry out send number 1: it has no memory"));
  });
  ranks.run([&](int r) { group[static_cast<std::size_t>(r)]->close(); });
}

// Between calls: the next call is refused, or the program asks, or aborts.
void a_transport_that_fails_unseen_is_told_to_all() {
  for (const std::string then : {"call", "ask", "abort"}) {
    FakeNetwork network(2, {});
    RankWithoutMemory ranks(network);
    const auto group = ranks.make();
    ranks.fail();
    std::vector<float> x(10, 1.0F);
    if (then == "call")
      CHECK(contains(failure_of([&] { group[0]->run(all_reduce(x), {}); }).message, "no thread"));
    if (then == "ask") CHECK(contains(group[0]->failure()->message, "no thread"));
    if (then == "abort") group[0]->abort("it is broken");
    await([&] { return group[1]->failure() != nullptr; });
    CHECK(group[1]->failure()->kind == FailureKind::kAborted);
    CHECK(contains(group[1]->failure()->message,
                   then == "abort" ? "rank 0 aborted the communicator: it is"
                                   : "the transport of rank 0 failed: no thread"));
    ranks.run([&](int r) { group[static_cast<std::size_t>(r)]->close(); });
  }
}

struct MpiBeside {
  explicit MpiBeside(const std::string& library) {
    void* const loaded = dlopen(library.c_str(), RTLD_NOW);
    CHECK(loaded != nullptr);
    mpi = reinterpret_cast<FakeMpi* (*)()>(dlsym(loaded, "fake_mpi"))();
    *mpi = {};
    MpiConstants constants;
    constants.library = library;
    constants.handle_bytes = sizeof(int);
    constants.status_bytes = kStatusBytes;
    constants.any_source = -2;
    constants.error_offset = kErrorOffset;
    constants.in_status = kInStatus;
    constants.proc_failed = kProcFailed;
    constants.proc_failed_pending = kProcFailedPending;
    link = make_mpi_link(constants, 1, {4, 2, 7}, false);
  }
  FakeMpi* mpi;
  std::shared_ptr<Link> link;
};

// MPI tells of several at once, and that one of them has failed.
void what_came_beside_a_failure_is_kept(const std::string& library) {
  MpiBeside beside(library);
  Link& link = *beside.link;
  float data[4] = {};
  const auto failed = link.receive(1, kLaneFirst, data, 4);
  const auto come = link.receive(2, kLaneFirst, data + 1, 4);
  const auto from_any = link.receive(Link::kAnyRank, kLaneControl, data + 2, 4);
  const auto sent = link.send(2, kLaneFirst, data + 3, 4, true);
  const auto forgotten = link.send(1, kLaneFirst, data + 3, 4, true);
  beside.mpi->ends = {{1, code_of(kProcFailed)}, {2, 0}, {3, code_of(kProcFailedPending)}};
  beside.mpi->forgets = 5;
  link.progress();
  CHECK(link.test(come) == Outcome::kDone);
  CHECK(link.test(failed) == Outcome::kLost && link.test(forgotten) == Outcome::kLost);
  CHECK(link.test(from_any) == Outcome::kUnderWay && link.test(sent) == Outcome::kUnderWay);
  const auto loss = link.lost();
  CHECK(loss && loss->rank == 1 && loss->how == "process failed");
  CHECK(link.lost()->rank == 1 && !link.lost());
  beside.mpi->ends = {{3, 0}, {4, 0}};
  link.progress();
  CHECK(link.test(from_any) == Outcome::kDone && link.test(sent) == Outcome::kDone);
}

// MPI numbers ranks in its own way; a message keeps its number until it is told of.
void messages_have_numbers_of_their_own(const std::string& library) {
  MpiBeside beside(library);
  Link& link = *beside.link;
  float data[4] = {};
  std::vector<Link::Transfer> messages;
  for (const int rank : {0, 1, 2}) messages.push_back(link.receive(rank, kLaneFirst, data, 4));
  messages.push_back(link.send(2, kLaneFirst, data, 4, true));
  messages.push_back(link.receive(Link::kAnyRank, kLaneControl, data, 4));
  CHECK((beside.mpi->peers == std::vector<int>{4, 2, 7, 7, -2}));
  // The first and the last end at once, and none of the others is lost for it.
  beside.mpi->ends = {{1, 0}, {5, 0}};
  link.progress();
  CHECK(link.test(messages[0]) == Outcome::kDone && link.test(messages[4]) == Outcome::kDone);
  for (const Link::Transfer each : messages)
    if (each != messages[0] && each != messages[4]) CHECK(link.test(each) == Outcome::kUnderWay);
  const auto next = link.receive(0, kLaneFirst, data, 4);
  CHECK(next != messages[0] && next != messages[4]);
  beside.mpi->ends = {{2, 0}, {3, 0}, {4, 0}, {6, 0}};
  link.progress();
  for (const Link::Transfer each : {messages[1], messages[2], messages[3], next})
    CHECK(link.test(each) == Outcome::kDone);
}

// A receive is cancelled once, a send never.
void only_receives_are_cancelled(const std::string& library) {
  MpiBeside beside(library);
  float data[2] = {};
  const auto sent = beside.link->send(1, kLaneFirst, data, 4, true);
  const auto awaited = beside.link->receive(1, kLaneFirst, data + 1, 4);
  for (int i = 0; i < 2; ++i)
    for (const auto each : {sent, awaited}) beside.link->cancel(each);
  CHECK(beside.mpi->cancelled == std::vector<int>{2});
}

// MPI's communicator is freed once; not while messages may be on their way, nor behind MPI's end.
void what_mpi_gave_is_given_back_once(const std::string& library) {
  for (const bool quiet : {true, false})
    for (const bool busy : {true, false})
      for (const bool finalized : {true, false}) {
        MpiBeside beside(library);
        float data = 0;
        if (busy) beside.link->receive(1, kLaneFirst, &data, 4);
        beside.mpi->finalized = finalized;
        beside.link->close(quiet);
        beside.link->close(quiet);
        CHECK(beside.mpi->freed == (quiet && !busy && !finalized));
      }
}

void a_message_that_mpi_cannot_count_is_refused(const std::string& library) {
  MpiBeside beside(library);
  bool thrown = false;
  try {
    beside.link->send(1, kLaneFirst, nullptr, std::size_t{1} << 32, true);
  } catch (const std::runtime_error& error) {
    thrown = contains(error.what(), "more than 2 GiB");
  }
  CHECK(thrown && beside.mpi->peers.empty());
}

// A rank is lost if MPI says so as a message begins, and for no other error.
void who_cannot_be_sent_to_is_lost(const std::string& library) {
  MpiBeside beside(library);
  float data = 0;
  beside.mpi->begins = code_of(kProcFailed);
  const auto lost = beside.link->send(2, kLaneFirst, &data, 4, true);
  CHECK(beside.link->test(lost) == Outcome::kLost);
  const auto loss = beside.link->lost();
  CHECK(loss && loss->rank == 2);
  beside.mpi->begins = code_of(kOther);
  bool thrown = false;
  try {
    beside.link->send(2, kLaneFirst, &data, 4, true);
  } catch (const std::runtime_error& error) {
    thrown = contains(error.what(), "MPI_Isend: another error");
  }
  CHECK(thrown && !beside.link->lost());
}

// An error as a message ends is this rank's own, whatever else has come.
void an_error_of_this_rank_loses_no_other(const std::string& library) {
  MpiBeside beside(library);
  float data[2] = {};
  const auto failed = beside.link->receive(1, kLaneFirst, data, 4);
  const auto from_any = beside.link->receive(Link::kAnyRank, kLaneControl, data, 4);
  const auto come = beside.link->receive(2, kLaneFirst, data + 1, 4);
  for (const int request : {1, 2}) {
    beside.mpi->ends = {{request, code_of(kOther)}, {3, 0}};
    bool thrown = false;
    try {
      beside.link->progress();
    } catch (const std::runtime_error& error) {
      thrown = contains(error.what(), "MPI_Testsome: another error");
    }
    CHECK(thrown && !beside.link->lost());
  }
  CHECK(beside.link->test(failed) == Outcome::kLost);
  CHECK(beside.link->test(from_any) == Outcome::kLost);
  CHECK(beside.link->test(come) == Outcome::kDone);
}

void a_rank_that_mpi_has_lost_is_named(const std::string& library) {
  MpiBeside beside(library);
  Messenger messenger(beside.link, 7, 0, {1, 2}, [] {});  // whose notices are request 1
  float data[2] = {};
  MessageHandle failed = messenger.receive(1, kLaneFirst, data, 4);
  MessageHandle come = messenger.receive(2, kLaneFirst, data + 1, 4);
  beside.mpi->ends = {{2, code_of(kProcFailed)}, {3, 0}};
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!messenger.notice() && std::chrono::steady_clock::now() < until) {
    messenger.poll();
    std::this_thread::yield();
  }
  CHECK(messenger.notice() && messenger.notice()->kind == FailureKind::kPeerFailure);
  CHECK(contains(messenger.notice()->report,
                 "rank 1 died or cannot be reached any more (process failed)"));
  CHECK(messenger.has_come(come) && !messenger.has_come(failed));
  CHECK(messenger.has_come(come) && messenger.done(come));
  messenger.give_up({failed}, nullptr);
}

}  // namespace

int main(int, char** arguments) {
  who_stops_amid_a_call_is_named(read_host_schedules("programs.txt", OpKind::kAllReduce));
  who_does_not_take_a_message_is_named();
  no_memory_is_no_death_of_a_peer();
  a_transport_that_fails_unseen_is_told_to_all();
  const std::string mpi = std::filesystem::absolute(arguments[0]).parent_path() / "libfake_mpi.so";
  messages_have_numbers_of_their_own(mpi);
  only_receives_are_cancelled(mpi);
  what_mpi_gave_is_given_back_once(mpi);
  a_message_that_mpi_cannot_count_is_refused(mpi);
  what_came_beside_a_failure_is_kept(mpi);
  who_cannot_be_sent_to_is_lost(mpi);
  an_error_of_this_rank_loses_no_other(mpi);
  a_rank_that_mpi_has_lost_is_named(mpi);
  std::puts("failures of links: passed");
}
