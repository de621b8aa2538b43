// Every operation, with every path and awkward counts, against results known by construction.
//
// Values are small integers, whose sums are exact: these tests are about which bytes move where and
// when (and are what the sanitizers watch). Rounding and order are tested from Python.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using pycollective::testing::ThreadGroup;
using pycollective::testing::ThreadRanks;

namespace {

constexpr float kUntouched = -77777;

constexpr std::size_t kPeriod = 1009;  // of the values

float value(int rank, std::size_t i) {
  return static_cast<float>((rank + 1) * static_cast<int>(i % kPeriod + 1) % 4001);
}

// What races does not depend on many of either; the pages of their shadows take TSan a minute.
#if defined(__SANITIZE_THREAD__)
constexpr int kMostRanks = 12;
constexpr std::size_t kMostElements = 30011;
#else
constexpr int kMostRanks = 64;
constexpr std::size_t kMostElements = 70001;
#endif

// Made once: to add them up for each element would take the sanitizers most of the time.
std::vector<float> sums_of_all() {
  std::vector<float> sums((kMostRanks + 1) * kPeriod);
  for (std::size_t at = kPeriod; at < sums.size(); ++at)
    sums[at] = sums[at - kPeriod] + value(static_cast<int>(at / kPeriod) - 1, at % kPeriod);
  return sums;
}
const std::vector<float> kSums = sums_of_all();

float sum_of(int ranks, std::size_t i) {
  return kSums[static_cast<std::size_t>(ranks) * kPeriod + i % kPeriod];
}

std::vector<float> input_of(int rank, std::size_t count) {
  std::vector<float> input(count);
  for (std::size_t i = 0; i < count; ++i) input[i] = value(rank, i);
  return input;
}

// Runs a request the way `turn` says: on this thread, or pending.
void perform(Communicator& comm, const Request& request, int turn) {
  if (turn % 2 == 0)
    comm.run(request, {});
  else
    CHECK(comm.submit(request, nullptr)->wait(0, {}));
}

struct Case {
  Communicator& comm;
  std::size_t count;
  int turn;

  int rank() const { return comm.rank(); }
  int size() const { return comm.size(); }
  std::size_t ranks() const { return static_cast<std::size_t>(comm.size()); }
  int root() const { return turn % comm.size(); }
  Request request(OpKind kind, const void* input, void* output) const {
    Request request;
    request.kind = kind;
    request.dtype = Dtype::kFloat32;
    request.count = count;
    request.root = root();
    request.input = input;
    request.output = output;
    return request;
  }
  std::vector<std::size_t> uneven_counts() const {
    std::vector<std::size_t> counts(ranks());
    for (int r = 0; r < size(); ++r) counts[r] = r % 3 == 1 ? 0 : count + 7 * r;
    return counts;
  }
};

void all_reduce(const Case& c) {
  std::vector<float> x = input_of(c.rank(), c.count);
  std::vector<float> out(c.count, kUntouched);
  const bool in_place = c.turn % 3 != 0;
  perform(c.comm, c.request(OpKind::kAllReduce, x.data(), in_place ? x.data() : out.data()),
          c.turn);
  const std::vector<float>& result = in_place ? x : out;
  for (std::size_t i = 0; i < c.count; ++i) CHECK(result[i] == sum_of(c.size(), i));
}

void reduce(const Case& c) {
  std::vector<float> x = input_of(c.rank(), c.count);
  std::vector<float> out(c.count, kUntouched);
  perform(c.comm, c.request(OpKind::kReduce, x.data(), out.data()), c.turn);
  for (std::size_t i = 0; i < c.count; ++i) {
    CHECK(out[i] == (c.rank() == c.root() ? sum_of(c.size(), i) : kUntouched));
    CHECK(x[i] == value(c.rank(), i));
  }
}

void reduce_scatter(const Case& c) {
  const std::vector<std::size_t> counts =
      c.turn % 3 == 0 ? c.uneven_counts() : std::vector<std::size_t>(c.ranks(), c.count);
  std::size_t total = 0;
  std::size_t begin = 0;
  for (int r = 0; r < c.size(); ++r) {
    if (r == c.rank()) begin = total;
    total += counts[r];
  }
  std::vector<float> x = input_of(c.rank(), total);
  std::vector<float> out(counts[c.rank()], kUntouched);
  Request request =
      c.request(OpKind::kReduceScatter, x.data(), c.turn % 2 == 0 ? out.data() : x.data() + begin);
  if (c.turn % 3 == 0) request.counts = counts;
  perform(c.comm, request, c.turn);
  const float* result = static_cast<const float*>(request.output);
  for (std::size_t i = 0; i < out.size(); ++i) CHECK(result[i] == sum_of(c.size(), begin + i));
}

void all_gather(const Case& c) {
  const bool uneven = c.turn % 3 == 0;
  const std::vector<std::size_t> counts =
      uneven ? c.uneven_counts() : std::vector<std::size_t>(c.ranks(), c.count);
  std::size_t total = 0;
  std::vector<std::size_t> begins;
  for (const std::size_t count : counts) {
    begins.push_back(total);
    total += count;
  }
  std::vector<float> x = input_of(c.rank(), counts[c.rank()]);
  std::vector<float> out(total, kUntouched);
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kGather}) {
    std::fill(out.begin(), out.end(), kUntouched);
    Request request = c.request(kind, x.data(), out.data());
    if (uneven) request.counts = counts;
    const bool receives = kind == OpKind::kAllGather || c.rank() == c.root();
    if (c.turn % 2 == 0 && receives && !x.empty()) {  // in place
      std::memcpy(out.data() + begins[c.rank()], x.data(), x.size() * sizeof(float));
      request.input = out.data() + begins[c.rank()];
    }
    perform(c.comm, request, c.turn);
    for (int r = 0; r < c.size(); ++r)
      for (std::size_t i = 0; i < counts[r]; ++i)
        CHECK(out[begins[r] + i] == (receives ? value(r, i) : kUntouched));
  }
}

void broadcast(const Case& c) {
  std::vector<float> x = input_of(c.rank(), c.count);
  perform(c.comm, c.request(OpKind::kBroadcast, x.data(), x.data()), c.turn);
  for (std::size_t i = 0; i < c.count; ++i) CHECK(x[i] == value(c.root(), i));
}

void scatter(const Case& c) {
  const bool root = c.rank() == c.root();
  std::vector<float> x = input_of(c.rank(), c.count * c.ranks());
  std::vector<float> out(c.count, kUntouched);
  const std::size_t begin = c.count * static_cast<std::size_t>(c.rank());
  Request request = c.request(OpKind::kScatter, x.data(), out.data());
  if (root && c.turn % 2 == 0) request.output = x.data() + begin;
  perform(c.comm, request, c.turn);
  const float* result = static_cast<const float*>(request.output);
  for (std::size_t i = 0; i < c.count; ++i) CHECK(result[i] == value(c.root(), begin + i));
}

void all_to_all(const Case& c) {
  std::vector<float> x = input_of(c.rank(), c.count * c.ranks());
  std::vector<float> out(x.size(), kUntouched);
  const bool in_place = c.turn % 2 == 0;
  perform(c.comm, c.request(OpKind::kAllToAll, x.data(), in_place ? x.data() : out.data()), c.turn);
  const std::vector<float>& result = in_place ? x : out;
  for (int r = 0; r < c.size(); ++r)
    for (std::size_t i = 0; i < c.count; ++i)
      CHECK(result[c.count * r + i] == value(r, c.count * c.rank() + i));
}

void send_and_receive(const Case& c) {
  if (c.size() == 1) return;
  // Everyone to its right, at once: sends and receives do not wait for each other.
  std::vector<float> x = input_of(c.rank(), c.count);
  std::vector<float> y(c.count, kUntouched);
  const int left = (c.rank() + c.size() - 1) % c.size();
  Request send = c.request(OpKind::kSend, x.data(), nullptr);
  send.root = (c.rank() + 1) % c.size();
  Request receive = c.request(OpKind::kRecv, nullptr, y.data());
  receive.root = left;
  const auto sent = c.comm.submit(send, nullptr);
  c.comm.run(receive, {});
  CHECK(sent->wait(0, {}));
  for (std::size_t i = 0; i < c.count; ++i) CHECK(y[i] == value(left, i));
}

// Each makes its channel: both at once, in one node.
void first_sends_of_two_threads() {
  for (int i = 0; i < 20; ++i) {
    const ThreadGroup group(3);
    const auto transfer = [&](OpKind kind, int rank, int peer) {
      std::vector<float> x(1000, static_cast<float>(rank));
      group[rank]->run(testing::pair(kind, x, peer), {});
      CHECK(x[999] == 0.0F);
    };
    group.run([&](int r) {
      if (r > 0) return transfer(OpKind::kRecv, r, 0);
      std::thread other([&] { transfer(OpKind::kSend, 0, 1); });
      transfer(OpKind::kSend, 0, 2);
      other.join();
    });
  }
}

void barrier(const Case& c) {
  perform(c.comm, c.request(OpKind::kBarrier, nullptr, nullptr), c.turn);
}

// `refused`: the last rank may not read the first one's memory, so none reads another's.
void every_operation(int ranks, std::size_t data_bytes, bool refused = false) {
  ThreadRanks threads(ranks);
  const auto group = threads.make_group(60, data_bytes);
  if (refused) testing::Inside::set_process(group.back()->group(), Member(0), 0, EPERM);
  const std::size_t counts[] = {
      0, 1, 3, static_cast<std::size_t>(ranks) - 1, 17, 1000, 4097, 20011, kMostElements};
  // Of many ranks each count once: their threads take long to start under a sanitizer.
  const int repeats = ranks > 8 ? 1 : 3;
  int turn = 0;
  for (const std::size_t count : counts) {
    for (int repeat = 0; repeat < repeats; ++repeat, ++turn)
      threads.run([&](int r) {
        const Case c{*group[r], ranks > 8 ? count % 5000 : count, turn};
        for (const auto operation : {all_reduce, reduce, reduce_scatter, all_gather, broadcast,
                                     scatter, all_to_all, send_and_receive, barrier})
          operation(c);
      });
  }
  for (const auto& each : group)
    CHECK(ranks == 1 || each->group().reading() ==
                            (refused ? Group::Reading::kForbidden : Group::Reading::kAllowed));
  threads.run([&](int r) { group[r]->close(); });
}

// Two communicators, their operations issued in opposite orders: neither waits for the other.
void opposite_orders() {
  ThreadRanks threads(2);
  const auto one = threads.make_group();
  const auto two = threads.make_group();
  for (int repeat = 0; repeat < 20; ++repeat)
    threads.run([&](int r) {
      std::vector<float> x = input_of(r, 50000);
      std::vector<float> y = input_of(r, 50000);
      const auto a = (r == 0 ? one : two)[r]->submit(testing::all_reduce(x), nullptr);
      const auto b = (r == 0 ? two : one)[r]->submit(testing::all_reduce(y), nullptr);
      CHECK(repeat % 2 ? a->wait(0, {}) && b->wait(0, {}) : b->wait(0, {}) && a->wait(0, {}));
      for (std::size_t i = 0; i < x.size(); ++i) CHECK(x[i] == sum_of(2, i) && y[i] == x[i]);
    });
}

// Nobody waits for the operation, so only the progress thread drives it. Asleep, it would stay so
// for longer than this test waits.
void a_call_wakes_the_progress_thread() {
  const ThreadGroup group(2);
  std::vector<float> x(40000, 1.0F);
  std::vector<float> y = x;
  for (int i = 0; i < 2000; ++i) {
    const auto begin = Clock::now() + std::chrono::nanoseconds(50 * (i % 200));
    while (Clock::now() < begin) continue;
    const auto a = group[0]->submit(testing::all_reduce(x), nullptr);
    const auto b = group[1]->submit(testing::all_reduce(y), nullptr);
    while (!(a->done() && b->done()) && Clock::now() < begin + std::chrono::seconds(10))
      std::this_thread::yield();
    CHECK(a->done() && b->done());
  }
}

// Copies prefetch the next input.
void larger_than_caches() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    std::vector<float> x = input_of(r, 700001);
    group[r]->run(testing::all_reduce(x), {});
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(x[i] == sum_of(2, i));
  });
}

// Many operations in flight, issued by several threads of each rank, with callbacks.
void many_pending() {
  const ThreadGroup group(3);
  constexpr int kOperations = 200;
  group.run([&](int r) {
    std::vector<std::vector<float>> buffers;
    std::vector<std::shared_ptr<Work>> works;
    std::atomic<int> done{0};
    for (int i = 0; i < kOperations; ++i) buffers.push_back(input_of(r, 1 + 331 * (i % 40)));
    for (int i = 0; i < kOperations; ++i) {
      works.push_back(group[r]->submit(testing::all_reduce(buffers[i]), [&](const Failure* f) {
        CHECK(f == nullptr);
        ++done;
      }));
      if (i % 17 == 0) {
        Request all;
        group[r]->run(all, {});  // a barrier behind what is pending
      }
    }
    for (const auto& work : works) CHECK(work->wait(30, {}));
    while (done != kOperations) std::this_thread::yield();
    for (const auto& buffer : buffers)
      for (std::size_t i = 0; i < buffer.size(); ++i) CHECK(buffer[i] == sum_of(3, i));
    group[r]->close();
  });
}

// Behind a synchronous call that another thread has under way, and with nobody who waits for it.
// Peers do not wake the progress thread for that: with each of their flags they would.
void what_comes_behind_a_synchronous_call_goes_on() {
  const ThreadGroup group(2);
  std::vector<float> x(10, 1.0F);
  std::vector<float> y(10, 1.0F);
  std::atomic<bool> held{false};
  std::atomic<bool> free{false};
  std::thread first([&] {
    group[0]->run(testing::all_reduce(x), [&] {
      held = true;
      testing::await([&] { return free.load(); });
      return false;
    });
  });
  testing::await([&] { return held.load(); });
  const auto behind = group[0]->submit(testing::all_reduce(y), nullptr);
  CHECK(group[0]->needs_driving());
  std::atomic<Mask>& sleepers = group[0]->group().mailbox(Member(0)).sleepers;
  sleepers = 0;
  group[0]->announce_sleep();
  CHECK(sleepers == 0);
  std::vector<float> message(10);
  const auto received = group[0]->submit(testing::pair(OpKind::kRecv, message, 1), nullptr);
  group[0]->announce_sleep();
  CHECK(sleepers == bit(Member(0)));
  free = true;
  std::vector<float> z(10, 1.0F);
  for (int i = 0; i < 2; ++i) group[1]->run(testing::all_reduce(z), {});
  group[1]->run(testing::pair(OpKind::kSend, z, 0), {});
  first.join();
  testing::await([&] { return behind->done() && received->done(); });
  CHECK(x[9] == 2.0F && y[9] == 3.0F && !group[0]->needs_driving());
}

// What comes behind it may need what the waiter does next. Here another thread is ending the first
// call while somebody begins to wait for it.
void a_wait_ends_with_what_it_waits_for() {
  const ThreadGroup group(2);
  std::vector<float> x(10, 1.0F), y(10, 1.0F), z(10, 1.0F);
  std::atomic<bool> ending{false};
  std::atomic<bool> free{false};
  Request request = testing::all_reduce(x);
  request.keep = std::shared_ptr<void>(&x, [&](void*) {
    ending = true;
    testing::await([&] { return free.load(); });
  });
  const auto first = group[0]->submit(request, nullptr);
  request.keep.reset();
  const auto behind = group[0]->submit(testing::all_reduce(y), nullptr);
  group[1]->run(testing::all_reduce(z), {});
  testing::await([&] { return ending.load(); });
  const auto begin = Clock::now();
  std::thread waiter([&] { CHECK(first->wait(5, {})); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  free = true;
  waiter.join();
  CHECK(Clock::now() - begin < std::chrono::seconds(4) && !behind->done());
  group[1]->run(testing::all_reduce(z), {});
  CHECK(behind->wait(30, {}));
}

// A caller may hold a lock until then that its peer needs.
void a_call_says_that_it_is_about_to_wait() {
  const ThreadGroup group(2);
  std::atomic<bool> told{false};
  group.run([&](int r) {
    std::vector<float> x(10, 1.0F);
    if (r == 1) testing::await([&] { return told.load(); });
    group[r]->run(testing::all_reduce(x), {}, [&] { told = told || r == 0; });
  });
  const ThreadGroup alone(1);
  std::vector<float> large(100000, 1.0F);
  bool works_long = false;
  alone[0]->run(testing::all_reduce(large), {}, [&] { works_long = true; });
  CHECK(works_long);
  // One that may copy by system calls.
  std::vector<float> y(9000);
  Request moves = testing::all_reduce(y);
  moves.kind = OpKind::kAllGather;
  moves.input = large.data();
  for (const std::size_t count : {std::size_t{8000}, std::size_t{9000}}) {
    moves.count = count;
    works_long = false;
    alone[0]->run(moves, {}, [&] { works_long = true; });
    CHECK(works_long == (count == 9000));
  }
}

// What accumulators hold, a block of 4 leaves each: added up as fp32 in place, then divided.
void blocks_that_were_dealt(int ranks) {
  const ThreadGroup group(ranks);
  const int shards = ranks + 1;  // of other lengths
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce})
    for (const std::size_t shard : {std::size_t{0}, std::size_t{3}, std::size_t{9001}})
      group.run([&](int r) {
        std::vector<std::size_t> counts(static_cast<std::size_t>(ranks), shard);
        counts.back() *= 2;
        const std::size_t count = shard * static_cast<std::size_t>(shards);
        std::vector<float> row = input_of(r, count);
        std::vector<float> out(count, kUntouched);
        DealtNodes nodes;
        nodes.rows = {row.data()};
        nodes.deal = 1;
        nodes.leaves = 4 * ranks;
        nodes.reduce_op = ReduceOp::kAvg;
        nodes.divisor = 0.5F;
        Request request = testing::all_reduce(out);
        request.kind = kind;
        request.root = ranks - 1;
        request.reduce_op = ReduceOp::kAvg;
        request.input = nullptr;
        request.nodes = std::make_shared<const DealtNodes>(nodes);
        const bool scatters = kind == OpKind::kReduceScatter;
        if (scatters) request.counts = counts;
        const std::size_t skip = scatters ? shard * static_cast<std::size_t>(r) : 0;
        const std::size_t mine = scatters ? counts[static_cast<std::size_t>(r)] : count;
        perform(*group[r], request, r);
        const bool gets = kind != OpKind::kReduce || r == ranks - 1;
        for (std::size_t i = 0; i < count; ++i)
          CHECK(out[i] == (gets && i < mine ? 2 * sum_of(ranks, skip + i) : kUntouched));
      });
  // Its rows are refused where they are not one each, and where they lie in the output.
  std::vector<float> x(10, 1.0F);
  Request request = testing::all_reduce(x);
  request.input = nullptr;
  DealtNodes nodes;
  nodes.divisor = 1;
  request.nodes = std::make_shared<const DealtNodes>(nodes);
  CHECK(testing::contains(testing::failure_of([&] { group[0]->run(request, {}); }).message,
                          "need a program"));
  nodes.rows = {x.data()};
  request.nodes = std::make_shared<const DealtNodes>(nodes);
  CHECK(testing::contains(testing::failure_of([&] { group[0]->run(request, {}); }).message,
                          "overlaps"));
  CHECK(group[0]->failure() == nullptr);
}

}  // namespace

int main() {
  blocks_that_were_dealt(1);
  blocks_that_were_dealt(3);
  what_comes_behind_a_synchronous_call_goes_on();
  a_wait_ends_with_what_it_waits_for();
  a_call_says_that_it_is_about_to_wait();
  a_call_wakes_the_progress_thread();
  for (const int ranks : {1, 2, 3, 4, 7}) every_operation(ranks, 0);
  every_operation(2, std::size_t{32} << 10);
  every_operation(5, std::size_t{32} << 10);
  every_operation(2, 0, true);
  every_operation(3, 0, true);
  every_operation(5, std::size_t{32} << 10, true);
  every_operation(kMostRanks, std::size_t{32} << 10);
  first_sends_of_two_threads();
  opposite_orders();
  larger_than_caches();
  many_pending();
  std::puts("collectives: passed");
}
