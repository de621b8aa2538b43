// Messages that wait: with collectives, with each other, without a progress thread; and what
// waiting costs.
#include <ctime>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <string>
#include <thread>

#include "engine/any_operation.h"
#include "engine/operations/point_to_point.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/messages.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Seconds, more than anything here takes: a hundred messages under TSan on a busy machine have
// taken ten.
constexpr double kEnough = 60;

void wait_for(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(milliseconds(1));
}

// CPU seconds of all threads of this process.
double computed() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A receive from any rank sleeps while it waits, also after earlier messages were received.
template <class Ranks>
void sleeps(const Ranks& group) {
  std::atomic<bool> measured{false};
  group.run([&](int r) {
    Communicator& comm = *group[r];
    std::vector<float> x(10, 1.0F);
    std::vector<float> y(10);
    if (r == 1) {
      comm.run(tagged(OpKind::kSend, x, 0, 1), {});
      wait_for(measured);
      return comm.run(tagged(OpKind::kSend, x, 0, 2), {});
    }
    comm.run(tagged(OpKind::kRecv, y, kAnySource, 1), {});
    const auto any = comm.submit(tagged(OpKind::kRecv, y, kAnySource, 2), nullptr);
    std::this_thread::sleep_for(milliseconds(100));
    const double before = computed();
    std::this_thread::sleep_for(milliseconds(400));
    CHECK(computed() - before < 0.2);
    measured = true;
    CHECK(any->wait(kEnough, {}));
  });
  group.run([&](int r) { group[r]->close(); });
}

void waiting_for_any_rank_sleeps() {
  sleeps(ThreadGroup(2, kEnough));
  FakeNetwork network(2, {});
  sleeps(HostGroup({1, 1}, network, kEnough));
}

// A rank that has done its part may close while its data are under way, although a receive from any
// rank listens to it, too.
void a_rank_closes_beside_a_receive_from_any() {
  FakeNetwork network(3, {5, 0, false, true});
  HostGroup group({1, 1, 1}, network, kEnough);
  std::atomic<bool> listening{false};
  std::atomic<bool> gone{false};
  std::atomic<bool> received{false};
  network.hold_from(kLanePair);
  group.run([&](int r) {
    Communicator& comm = *group[r];
    std::vector<float> x(r == 2 ? 4 : 20000, 1.0F);
    if (r == 1) {
      wait_for(listening);
      comm.run(tagged(OpKind::kSend, x, 0, 2), {});
      comm.close();
      network.kill(1, false);  // its connections end after all that it has sent
      gone = true;
      return;
    }
    if (r == 2) {
      wait_for(received);
      return comm.run(tagged(OpKind::kSend, x, 0, 9), {});
    }
    std::vector<float> few(4);
    std::vector<float> many(20000);
    const auto any = comm.submit(tagged(OpKind::kRecv, few, kAnySource, 9), nullptr);
    const auto named = comm.submit(tagged(OpKind::kRecv, many, 1, 2), nullptr);
    listening = true;
    wait_for(gone);
    std::this_thread::sleep_for(milliseconds(100));
    CHECK(!named->done());
    network.release();
    CHECK(named->wait(kEnough, {}));
    CHECK(many == x);
    received = true;
    CHECK(any->wait(kEnough, {}));
  });
  group.close();
}

// A waiting thread drives all operations of its rank: its peer may wait for another one.
void without_a_progress_thread() {
  for (const std::size_t count : {1, 2049, 30000})
    everywhere(
        2,
        [count](Communicator& comm, int rank) {
          std::vector<float> one = message(0, 1, 1, 0, count);
          std::vector<float> two = message(0, 1, 2, 0, count);
          std::vector<float> x(count);
          std::vector<float> y(count);
          Exchanged all(rank, 2, count);
          if (rank == 0) {
            const auto first = comm.submit(tagged(OpKind::kSend, one, 1, 1), nullptr);
            const auto second = comm.submit(tagged(OpKind::kSend, two, 1, 2), nullptr);
            CHECK(second->wait(kEnough, {}));
            CHECK(first->wait(kEnough, {}));
            const auto third = comm.submit(tagged(OpKind::kSend, one, 1, 1), nullptr);
            comm.run(all.request, {});
            CHECK(third->wait(kEnough, {}));
          } else {
            comm.run(tagged(OpKind::kRecv, x, 0, 1), {});
            comm.run(tagged(OpKind::kRecv, y, 0, 2), {});
            CHECK(x == one && y == two);
            comm.run(tagged(OpKind::kRecv, y, 0, 1), {});
            comm.run(all.request, {});
            CHECK(y == one);
          }
          CHECK(all.is_right());
        },
        kEnough, false);
}

// Collectives go on however many of the user's messages wait for their receives.
void collectives_beside_many_messages() {
  everywhere(
      2,
      [](Communicator& comm, int rank) {
        constexpr int kTags = static_cast<int>(kAnnouncements) + 40;
        constexpr std::size_t kCount = 3000;  // too long to go with a call
        std::vector<std::vector<float>> x;
        std::vector<std::shared_ptr<Work>> works;
        for (int tag = 0; tag < kTags; ++tag) x.push_back(message(0, 1, tag, 0, kCount));
        for (int tag = 0; rank == 0 && tag < kTags; ++tag) {
          std::vector<float>& each = x[static_cast<std::size_t>(tag)];
          works.push_back(comm.submit(tagged(OpKind::kSend, each, 1, tag), nullptr));
        }
        for (int i = 0; i < 3; ++i) {
          Exchanged all(rank, 2, 5000);
          comm.run(all.request, {});
          CHECK(all.is_right());
        }
        for (int tag = 0; rank == 1 && tag < kTags; ++tag) {
          std::vector<float> got(kCount);
          comm.run(tagged(OpKind::kRecv, got, 0, tag), {});
          CHECK(got == x[static_cast<std::size_t>(tag)]);
        }
        for (const auto& work : works) CHECK(work->wait(kEnough, {}));
      },
      kEnough);
}

// close() ends a server's receives from any rank without a failure. A message that has come is
// received.
void receives_from_any_end_with_close() {
  std::atomic<int> closed{0};
  everywhere(
      3,
      [&](Communicator& comm, int rank) {
        const int before = closed;
        std::vector<float> x = message(1, 0, 7, 0, 3000);
        Exchanged all(rank, 3, 100);
        if (rank == 1) comm.run(tagged(OpKind::kSend, x, 0, 7), {});
        if (rank != 0) {
          comm.run(all.request, {});
          while (closed == before) std::this_thread::sleep_for(milliseconds(1));
          return;
        }
        std::vector<std::vector<float>> y(5, std::vector<float>(3000));
        std::vector<std::shared_ptr<Work>> works;
        for (const int tag : {3, 3, 4})
          works.push_back(
              comm.submit(tagged(OpKind::kRecv, y[works.size()], kAnySource, tag), nullptr));
        std::atomic<bool> aborted{false};
        std::atomic<bool> begun{false};
        std::thread synchronous([&] {
          begun = true;
          const Request receive = tagged(OpKind::kRecv, y[3], kAnySource, 5);
          const Failure failure = failure_of([&] { comm.run(receive, {}); });
          aborted = failure.kind == FailureKind::kAborted;
        });
        const auto served = comm.submit(tagged(OpKind::kRecv, y[4], kAnySource, 7), nullptr);
        comm.run(all.request, {});
        CHECK(served->wait(kEnough, {}));
        wait_for(begun);
        std::this_thread::sleep_for(milliseconds(400));  // until it waits
        const auto since = Clock::now();
        comm.close();
        CHECK(Clock::now() - since < std::chrono::seconds(5));
        synchronous.join();
        CHECK(aborted);
        for (const auto& work : works)
          CHECK(work->done() && work->failure() != nullptr &&
                work->failure()->kind == FailureKind::kAborted &&
                work->failure()->message.find("before a message came") != std::string::npos);
        CHECK(y[4] == x && comm.failure() == nullptr);
        ++closed;
      },
      kEnough);
}

// A synchronous receive, too, comes before one from any rank that was called later.
void a_synchronous_receive_comes_first() {
  everywhere(2, [](Communicator& comm, int rank) {
    for (int round = 0; round < 30; ++round) {
      std::vector<float> first = message(1, 0, 6, 2 * round, 5);
      std::vector<float> second = message(1, 0, 6, 2 * round + 1, 5);
      std::vector<float> none;
      if (rank == 1) {
        comm.run(tagged(OpKind::kRecv, none, 0, 1), {});
        comm.run(tagged(OpKind::kSend, first, 0, 6), {});
        comm.run(tagged(OpKind::kSend, second, 0, 6), {});
        continue;
      }
      std::vector<float> x(5);
      std::vector<float> y(5);
      std::thread named([&] { comm.run(tagged(OpKind::kRecv, x, 1, 6), {}); });
      while (!comm.busy()) std::this_thread::yield();
      const auto any = comm.submit(tagged(OpKind::kRecv, y, kAnySource, 6), nullptr);
      comm.run(tagged(OpKind::kSend, none, 1, 1), {});
      named.join();
      CHECK(any->wait(kEnough, {}));
      CHECK(x == first && y == second);
    }
  });
}

// Whatever a peer has written as its buffer's offset, nothing beyond its memory is read.
void a_wrong_buffer_harms_nobody() {
  for (const std::uint64_t buffer : {std::uint64_t{1} << 44, std::uint64_t{kSegmentBytes - kPage},
                                     std::uint64_t{kPage + 8}, ~std::uint64_t{0}}) {
    const ThreadGroup group(2, kEnough);
    std::vector<float> x(3000, 1.0F);
    std::vector<float> y(3000);
    const auto sent = group[1]->submit(tagged(OpKind::kSend, x, 0, 1), nullptr);
    SendingHalf& half = group[1]->group().sending_half(Member(1), Member(0));
    const std::uint64_t right = half.buffer;
    half.buffer = buffer;
    half.places = kAnnouncements;
    const auto none = group[0]->submit(tagged(OpKind::kRecv, y, 1, 2), nullptr);
    CHECK(!none->wait(0.01, {}));
    const auto refused = [](const auto& call) {
      return failure_of(call).kind == FailureKind::kAborted;
    };
    CHECK(refused([&] { group[0]->run(tagged(OpKind::kRecv, y, 1, 1), {}); }));
    // Its thread has read the offset that is put right here.
    CHECK(refused([&] { none->wait(kEnough, {}); }) && none->done());
    half.buffer = right;
  }
}

// Nor does the sender write anywhere else.
void a_wrong_buffer_is_not_written_to() {
  const ThreadGroup group(2, kEnough);
  SendingHalf& half = group[1]->group().sending_half(Member(1), Member(0));
  std::vector<float> x(3000, 1.0F);
  const auto send = [&](int tag) {
    return group[1]->submit(tagged(OpKind::kSend, x, 0, tag), nullptr);
  };
  const auto receive = [&](int tag) {
    std::vector<float> y(x.size());
    group[0]->run(tagged(OpKind::kRecv, y, 1, tag), {});
    CHECK(y == x);
  };
  const auto first = send(1);
  const std::uint64_t right = half.buffer;
  half.buffer = std::uint64_t{1} << 44;
  const auto second = send(2);  // an announcement behind the parts
  half.buffer = right;
  receive(1);
  receive(2);
  CHECK(first->wait(kEnough, {}) && second->wait(kEnough, {}));
  half.buffer = std::uint64_t{1} << 44;
  const auto third = send(1);  // its first chunk
  half.buffer = right;
  receive(1);
  CHECK(third->wait(kEnough, {}));
}

// A send without a place is not granted, whatever the last grant was.
void a_send_without_a_place_has_not_been_called() {
  const ThreadGroup group(2, kEnough);
  group.run([&](int r) {
    if (r != 0) return;
    std::vector<float> x(4, 1.0F);
    std::vector<Request> requests(kAnnouncements + 1);
    std::deque<Task> tasks;
    std::vector<std::unique_ptr<Send>> sends;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i] = tagged(OpKind::kSend, x, 1, static_cast<int>(i));
      sends.push_back(
          std::make_unique<Send>(group[0]->group(), tasks.emplace_back(requests[i]), i + 1));
      sends.back()->start();
      CHECK(!sends.back()->called_by(Member(1)));
    }
  });
}

// However many messages wait, the kernel is asked once for all of them whether peers live.
void one_look_serves_all() {
  const ThreadGroup group(2, kEnough);
  Sight earlier(group[0]->group());
  CHECK(earlier.gone() == 0);
  group[1]->close();
  CHECK(earlier.gone() == 0);
  CHECK(Sight(group[0]->group()).gone() == bit(Member(1)));
}

// --- Between hosts: which receives a rank posts, and ranks that have left.

// It keeps a receive posted for others' calls, and no other.
void a_receive_from_any_listens_for_calls_alone() {
  FakeNetwork network(2, {});
  HostGroup group({1, 1}, network, 20);
  group.run([&](int r) {
    Communicator& comm = *group[r];
    std::vector<float> x(4, 1.0F);
    if (r == 1) {
      comm.run(tagged(OpKind::kSend, x, 0, 1), {});
      return comm.run(tagged(OpKind::kRecv, x, 0, 2), {});
    }
    const std::size_t before = network.posted(0);
    comm.run(tagged(OpKind::kRecv, x, kAnySource, 1), {});
    CHECK(network.posted(0) == before + 1);
    comm.run(tagged(OpKind::kSend, x, 1, 2), {});
    CHECK(network.posted(0) == before + 1);
  });
  group.close();
}

// A call that a receive from any rank has heard for another receive counts as come. A call that
// nobody awaits does not count for an awaited one.
void what_another_receive_heard_has_come() {
  for (const int sent_tag : {2, 3}) {
    FakeNetwork network(2, {});
    HostRanks hosts({1, 1}, network);
    std::vector<float> x(4, 1.0F);
    std::vector<float> y(4);
    std::vector<float> z(4);
    const Request send = tagged(OpKind::kSend, x, 0, sent_tag);
    const Request receive = tagged(OpKind::kRecv, y, 1, 2);
    const Request other = tagged(OpKind::kRecv, z, kAnySource, 9);
    const Task send_task(send);
    const Task receive_task(receive);
    const Task other_task(other);
    InternodePair named(*hosts.group(0), receive_task, 1);
    ReceiveAny any(*hosts.group(0), other_task, 1);
    any.start();
    named.start();
    {
      InternodePair sending(*hosts.group(1), send_task, 1);
      sending.start();
      if (sent_tag == 2)
        while (sending.advance() != State::kDone) std::this_thread::yield();
    }
    hosts.group(1)->leave();
    const auto end = Clock::now() + milliseconds(600);
    while (Clock::now() < end) {
      CHECK(any.advance() != State::kDone);
      std::this_thread::sleep_for(milliseconds(5));
    }
    CHECK((hosts.group(0)->messenger()->notice() == nullptr) == (sent_tag == 2));
    if (sent_tag == 2) CHECK(named.advance() == State::kDone && y == x);
  }
}

// Short messages with several tags from one rank to another.
struct ManyTags {
  ManyTags(HostRanks& hosts, std::size_t count) : x(count), y(count), sends(count) {
    receives.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      x[i].assign(4, static_cast<float>(i));
      y[i].resize(4);
      const int tag = static_cast<int>(i);
      receives[i] = tagged(OpKind::kRecv, y[i], 1, tag);
      receiving.push_back(
          std::make_unique<InternodePair>(*hosts.group(0), tasks.emplace_back(receives[i]), i + 1));
      receiving[i]->start();
      sends[i] = tagged(OpKind::kSend, x[i], 0, tag);
      sending.push_back(
          std::make_unique<InternodePair>(*hosts.group(1), tasks.emplace_back(sends[i]), i + 1));
      sending[i]->start();
    }
  }
  // Done once the receives have answered; the calls may still be under way.
  void send(const std::function<void()>& meanwhile) {
    for (const auto& each : sending)
      while (each->advance() != State::kDone) meanwhile();
    sending.clear();
  }
  void receive(HostRanks& hosts, milliseconds between) {
    const Messenger& messenger = *hosts.group(0)->messenger();
    for (const auto& each : receiving) do {
        std::this_thread::sleep_for(between);
      } while (each->advance() != State::kDone && !messenger.notice());
    CHECK(!messenger.notice());
    CHECK(y == x);
  }
  std::vector<std::vector<float>> x;
  std::vector<std::vector<float>> y;
  std::vector<Request> sends;
  std::vector<Request> receives;
  std::deque<Task> tasks;
  std::vector<std::unique_ptr<InternodePair>> sending;
  std::vector<std::unique_ptr<InternodePair>> receiving;
};

// A goodbye overtakes calls with several tags, which come one by one.
void messages_come_after_their_senders_goodbye() {
  FakeNetwork network(2, {});
  HostRanks hosts({1, 1}, network);
  ManyTags all(hosts, 6);
  all.send(std::this_thread::yield);
  hosts.group(1)->leave();
  all.receive(hosts, milliseconds(150));
}

// A rank that closes waits while its calls leave one by one.
void who_closes_sends_all_it_has() {
  FakeNetwork network(2, {3, 0, true});
  HostRanks hosts({1, 1}, network);
  ManyTags all(hosts, 14);
  all.send(std::this_thread::yield);
  std::thread receiver([&] { all.receive(hosts, milliseconds(100)); });
  hosts.group(1)->leave();
  receiver.join();
}

// After it has heard another operation's call, an operation looks again before it sleeps:
// nothing may wake it for the calls behind.
void a_heard_call_is_progress() {
  for (const bool from_any : {false, true}) {
    FakeNetwork network(2, {});
    HostRanks hosts({1, 1}, network);
    std::vector<float> x(4, 1.0F);
    std::vector<float> y(4);
    const Request first = tagged(OpKind::kSend, x, 0, 1);
    const Request second = tagged(OpKind::kSend, x, 0, 2);
    const Request receive = tagged(OpKind::kRecv, y, from_any ? kAnySource : 1, 2);
    const Request other = tagged(OpKind::kRecv, y, 1, 1);
    const Task tasks[] = {Task(first), Task(second), Task(receive), Task(other)};
    AnyOperation room;
    Operation& receiving = room.make(*hosts.group(0), tasks[2], 1);
    receiving.start();
    InternodePair named(*hosts.group(0), tasks[3], 2);
    named.start();
    InternodePair one(*hosts.group(1), tasks[0], 1);
    InternodePair two(*hosts.group(1), tasks[1], 2);
    one.start();
    two.start();
    State state = receiving.advance();
    CHECK(state == State::kProgressed);
    while (state == State::kProgressed) state = receiving.advance();
    CHECK(state == State::kDone && y == x);
  }
}

}  // namespace

int main() {
  waiting_for_any_rank_sleeps();
  a_rank_closes_beside_a_receive_from_any();
  without_a_progress_thread();
  collectives_beside_many_messages();
  receives_from_any_end_with_close();
  a_synchronous_receive_comes_first();
  a_wrong_buffer_harms_nobody();
  a_wrong_buffer_is_not_written_to();
  a_send_without_a_place_has_not_been_called();
  one_look_serves_all();
  a_receive_from_any_listens_for_calls_alone();
  what_another_receive_heard_has_come();
  messages_come_after_their_senders_goodbye();
  who_closes_sends_all_it_has();
  a_heard_call_is_progress();
  std::puts("messages, waiting: passed");
  return 0;
}
