// What a communicator leaves behind: no running callback, no write to another group's memory, no
// peer that is gone.
#include <cstdio>
#include <thread>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/inside.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

void close_returns_when_nobody_is_being_told() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    std::vector<float> x(100000, 1.0F);
    std::atomic<bool> told{false};
    const auto work = group[r]->submit(all_reduce(x), [&](const Failure* failure) {
      CHECK(failure == nullptr);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      told = true;
    });
    while (!work->done()) std::this_thread::yield();
    group[r]->close();
    CHECK(told);
  });
}

// abort() ends pending operations on its own thread, here while another thread closes.
void close_waits_for_what_abort_tells() {
  const ThreadGroup group(2);
  std::vector<float> x(1000, 1.0F);
  std::atomic<int> told{0};
  for (int i = 0; i < 3; ++i)
    group[0]->submit(all_reduce(x), [&](const Failure* failure) {
      CHECK(failure != nullptr);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ++told;
    });
  std::thread aborting([&] { group[0]->abort("enough"); });
  group[0]->close();
  CHECK(told == 3);
  aborting.join();
  group[1]->close();
}

// close() overtakes the progress thread between two steps; the memory serves another group.
void a_sleep_after_close_is_announced_to_nobody() {
  ThreadRanks threads(2);
  const auto old = threads.make_group();
  const Mailbox* mailbox = &old[0]->group().mailbox(Member(0));
  threads.run([&](int r) { old[r]->close(); });
  const auto group = threads.make_group();
  CHECK(&group[0]->group().mailbox(Member(0)) == mailbox);
  old[0]->announce_sleep();
  old[1]->announce_sleep();
  CHECK(mailbox->sleepers == 0);
}

void a_bit_of_no_rank_wakes_nobody() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    for (int i = 0; i < 100; ++i) {
      std::vector<float> x(10, 1.0F);
      group[r]->group().mailbox(Member(0)).sleepers.fetch_or(bit(Member(2)) | bit(Member(63)));
      group[r]->run(all_reduce(x), {});
      CHECK(x[9] == 2.0F);
    }
  });
}

// Rank 1 joins with a new segment each time; the group before is kept.
void peers_that_are_gone_are_let_go_of() {
  const auto mine = std::make_shared<Node>();
  const auto progress = std::make_shared<Progress>(mine);
  std::vector<std::shared_ptr<Communicator>> kept;
  for (int i = 0; i < 50; ++i) {
    const auto other = std::make_shared<Node>();
    Inside::attach(*mine, *other);
    const MailboxRange mailbox = mine->allocate_mailbox(2);
    const MailboxRange others = other->allocate_mailbox(2);
    Inside::attach(*other, *mine);
    const std::vector<Token> tokens = {mine->token(), other->token()};
    const std::vector<std::size_t> offsets = {mailbox.offset, others.offset};
    const std::size_t bytes = std::min(mailbox.data_bytes, others.data_bytes);
    kept.push_back(std::make_shared<Communicator>(
        std::make_unique<Group>(mine, Member(0), tokens, offsets, mailbox, bytes), progress, 60));
    const auto theirs = std::make_shared<Communicator>(
        std::make_unique<Group>(other, Member(1), tokens, offsets, others, bytes),
        std::make_shared<Progress>(other), 60);
    kept.back()->close();
    theirs->close();
    CHECK(mine->find(other->token()) != nullptr);  // it lives: others count on it
    CHECK(Inside::attached(*mine) <= 3);           // the own one, this one, the one before
  }
}

// At the end of the process, waiting callers drive what is left.
void operations_go_on_without_the_progress_thread() {
  const ThreadGroup alone(1);
  std::vector<float> x(1 << 20, 1.0F);
  const auto before = alone[0]->submit(all_reduce(x), nullptr);
  alone.stop_progress();
  const auto after = alone[0]->submit(all_reduce(x), nullptr);
  CHECK(before->wait(30, {}) && after->wait(30, {}));
  alone.stop_progress();
  alone[0]->close();
}

void leaving_after_the_last_operation_harms_nobody() {
  const ThreadGroup group(3);
  group.run([&](int r) {
    std::vector<float> x(300000, 1.0F);
    group[r]->run(all_reduce(x), {});
    for (const float value : x) CHECK(value == 3.0F);
    if (r == 0) return group[r]->close();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    // Its absence from a further operation is seen at once, and named.
    const auto start = Clock::now();
    const Failure failure = failure_of([&] { group[r]->run(all_reduce(x), {}); });
    CHECK(failure.kind == FailureKind::kPeerFailure);
    CHECK(contains(failure.message, "rank 0 closed its communicator"));
    CHECK(contains(failure.message, "it has made fewer calls: all ranks must make as many"));
    CHECK(Clock::now() - start < std::chrono::seconds(5));
  });
}

void an_interrupted_close_closes_and_says_so() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    std::vector<float> x(1000, 1.0F);
    if (r == 1) return;
    const auto pending = group[r]->submit(all_reduce(x), nullptr);
    bool asked = false;  // as Python's: true once
    const Failure failure =
        failure_of([&] { group[r]->close([&asked] { return !std::exchange(asked, true); }); });
    CHECK(failure.kind == FailureKind::kAborted);
    CHECK(group[r]->closed() && pending->done());
  });
  CHECK(group[1]->failure()->kind == FailureKind::kAborted);
}

// close() waits for another thread's call without a core of its own, and can be interrupted.
void close_waits_for_a_call_of_another_thread() {
  const ThreadGroup group(2);
  std::thread receiver([&] {
    std::vector<float> x(1);
    const Failure failure = failure_of([&] { group[0]->run(pair(OpKind::kRecv, x, 1), {}); });
    CHECK(failure.kind == FailureKind::kAborted);
  });
  while (!group[0]->busy()) std::this_thread::yield();
  int asked = 0;
  const Failure failure = failure_of([&] { group[0]->close([&asked] { return ++asked == 20; }); });
  CHECK(failure.kind == FailureKind::kAborted && asked == 20);
  receiver.join();
}

// Its mailbox may belong to another group by then.
void abort_after_close_reaches_nobody() {
  ThreadRanks threads(2);
  const auto old = threads.make_group();
  threads.run([&](int r) { old[r]->close(); });
  const auto group = threads.make_group();
  old[0]->abort("too late");
  threads.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    group[r]->run(all_reduce(x), {});
    CHECK(x[9] == 2.0F);
  });
  group[0]->abort("another group");
  CHECK(old[1]->failure() == nullptr);
}

// Groups made and closed without end take no more memory than a few.
void mailboxes_are_given_back() {
  ThreadRanks threads(2);
  for (int i = 0; i < 2000; ++i) {
    const auto group = threads.make_group();
    threads.run([&](int r) {
      std::vector<float> x(10, 1.0F);
      group[r]->run(all_reduce(x), {});
      group[r]->close();
    });
  }
}

}  // namespace

int main() {
  close_returns_when_nobody_is_being_told();
  close_waits_for_what_abort_tells();
  a_sleep_after_close_is_announced_to_nobody();
  a_bit_of_no_rank_wakes_nobody();
  peers_that_are_gone_are_let_go_of();
  operations_go_on_without_the_progress_thread();
  leaving_after_the_last_operation_harms_nobody();
  an_interrupted_close_closes_and_says_so();
  close_waits_for_a_call_of_another_thread();
  abort_after_close_reaches_nobody();
  mailboxes_are_given_back();
  std::puts("ending: passed");
}
