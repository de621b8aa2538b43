// Messages between hosts that wait: which receives a rank posts, and ranks that have left.
#include <ctime>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <string>
#include <thread>

#include "engine/operations/point_to_point.h"
#include "engine/pending.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/messages.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// It keeps a receive posted for others' calls, and no other.
void a_receive_from_any_listens_for_calls_alone() {
  FakeNetwork network(2, {});
  HostRanks ranks({1, 1}, network);
  const auto group = ranks.make_communicators(20);
  ranks.run([&](int r) {
    Communicator& comm = *group[static_cast<std::size_t>(r)];
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
  ranks.run([&](int r) { group[static_cast<std::size_t>(r)]->close(); });
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

// After it has heard another operation's call, an operation looks again before it sleeps: no bell
// may ring for the calls behind.
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
  a_receive_from_any_listens_for_calls_alone();
  what_another_receive_heard_has_come();
  messages_come_after_their_senders_goodbye();
  who_closes_sends_all_it_has();
  a_heard_call_is_progress();
  std::puts("messages between hosts: passed");
  return 0;
}
