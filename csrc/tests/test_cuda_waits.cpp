// How kernels that carry out programs wait: replayed, with counters that wrap, beside other groups,
// and where what they wait for does not come.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "tests/cases.h"
#include "tests/device_calls.h"
#include "tests/device_programs.h"

namespace pycollective::testing {
namespace {

constexpr std::size_t kMemory = std::size_t{1} << 20;  // of a rank
constexpr std::uint64_t kSecond = 1'000'000'000;       // nanoseconds
constexpr double kSoon = 10;                           // seconds, on a machine that is busy

// A CUDA graph of what is put on a rank's stream. The driver's functions for it are fetched here:
// the library captures nothing itself.
class Graph {
 public:
  template <class Body>
  Graph(const Rank& rank, const Body& body) : rank_(&rank) {
    const Current current(rank.device->context);
    call("cuStreamBeginCapture", 10010, rank.stream, 0);
    body();
    void* graph = nullptr;
    call("cuStreamEndCapture", 10000, rank.stream, &graph);
    // By its own name: of version 12.0 the driver still gives "cuGraphInstantiate" with five
    // parameters, which <cuda.h> hides by a macro.
    call("cuGraphInstantiateWithFlags", 11040, &executable_, graph, 0ULL);
    call("cuGraphDestroy", 10000, graph);
  }
  ~Graph() {
    if (executable_ == nullptr) return;
    const Current current(rank_->device->context);
    call("cuGraphExecDestroy", 10000, executable_);
  }
  Graph(Graph&& other) noexcept : rank_(other.rank_), executable_(other.executable_) {
    other.executable_ = nullptr;
  }
  Graph& operator=(Graph&&) = delete;
  void launch() const {
    const Current current(rank_->device->context);
    call("cuGraphLaunch", 10000, executable_, rank_->stream);
  }

 private:
  template <class... Parameters>
  static void call(const char* name, int version, Parameters... parameters) {
    static void* const library = dlopen(driver().library.c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    const auto get = reinterpret_cast<cuda::GetProcAddress>(dlsym(library, cuda::kGetProcAddress));
    void* found = nullptr;
    cuda::CUdriverProcAddressQueryResult result = cuda::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    OK(get(name, &found, version, cuda::CU_GET_PROC_ADDRESS_LEGACY_STREAM, &result));
    CHECK(found != nullptr);
    cuda::check(reinterpret_cast<cuda::CUresult (*)(Parameters...)>(found)(parameters...), name);
  }

  const Rank* rank_;
  void* executable_ = nullptr;
};

Call call_of(const Programs& programs, std::size_t count, Dtype dtype = Dtype::kFloat32) {
  Call call;
  call.programs = programs;
  call.dtype = dtype;
  call.count = count;
  return call;
}

// A graph of several calls, replayed with other numbers: each replay goes on where the last has
// ended, in the slots and with the marks of its turn.
void graphs_replay(Devices& devices, int n, std::uint32_t first_chunk) {
  Random random(3);
  DeviceRanks ranks(devices, n, {2, 4096}, kMemory, false, first_chunk);
  std::vector<Placed> calls;
  std::size_t at = 0;
  for (const Programs& programs : {one_shot(n), programs_of("direct", OpKind::kAllReduce, n),
                                   programs_of("ring", OpKind::kReduceScatter, n), one_shot(n)}) {
    calls.emplace_back(call_of(programs, 777 + 100 * calls.size()), at, random);
    at += calls.back().bytes();
  }
  CHECK(at <= kMemory);
  for (int r = 0; r < n; ++r)
    for (const Placed& each : calls)
      ranks.at(r).peers->upload(each.call().programs[static_cast<std::size_t>(r)]);
  std::vector<Graph> graphs;
  for (int r = 0; r < n; ++r)
    graphs.emplace_back(ranks.at(r), [&] {
      for (const Placed& each : calls) each.launch(ranks.at(r), r);
    });
  for (int replay = 0; replay < 5; ++replay) {
    for (Placed& each : calls) {
      each.draw(random);
      each.write(ranks);
    }
    for (int r = 0; r < n; ++r) graphs[static_cast<std::size_t>(r)].launch();
    ranks.synchronize();
    ranks.check_no_endings();
    for (const Placed& each : calls) each.check(ranks);
    if (replay != 2) continue;  // and a call between replays
    calls[0].launch(ranks);
    ranks.synchronize();
  }
}

// Marks and chunks go past their last number in the midst of calls.
void counters_wrap(Devices& devices) {
  constexpr std::uint32_t kLast = (1U << (32 - cuda::kEventBits)) - 1;
  Random random(5);
  for (const std::uint32_t first : {kLast - 4, kLast, (kLast >> 1) - 3}) {
    const int n = 4;
    DeviceRanks ranks(devices, n, {2, 2304}, kMemory, false, first);
    for (const Programs& programs :
         {one_shot(n), programs_of("ring", OpKind::kAllReduce, n), one_shot(n)}) {
      Placed call(call_of(programs, 5000), 0, random);
      call.write(ranks);
      call.launch(ranks);
      ranks.synchronize();
      ranks.check_no_endings();
      call.check(ranks);
    }
    graphs_replay(devices, 4, first);
  }
}

// Calls that follow each other without anybody waiting between them, each with other numbers: what
// is of an earlier chunk shows.
void many_calls(Devices& devices, int n, bool on_one) {
  Random random(6);
  DeviceRanks ranks(devices, n, {on_one ? 1U : 2U, 2304}, kMemory, on_one);
  const Programs kinds[] = {one_shot(n), programs_of("direct", OpKind::kAllReduce, n),
                            programs_of("direct", OpKind::kAllGather, n),
                            programs_of("tree", OpKind::kBroadcast, n)};
  for (int round = 0; round < 3; ++round) {
    std::vector<Placed> calls;
    std::size_t at = 0;
    for (int i = 0; i < 40; ++i) {
      calls.emplace_back(call_of(kinds[i % 4], 1 + random() % 900, Dtype::kBFloat16), at, random);
      at += calls.back().bytes();
    }
    CHECK(at <= kMemory);
    for (const Placed& each : calls) each.write(ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
      threads.emplace_back([&, r] {
        for (const Placed& each : calls) each.launch(ranks.at(r), r);
      });
    for (std::thread& thread : threads) thread.join();
    ranks.synchronize();
    ranks.check_no_endings();
    for (const Placed& each : calls) each.check(ranks);
  }
}

// Parts of a hundred kilobytes in slots of two; under TSan, which takes a second for each of these,
// of forty.
void larger_than_all_slots(Devices& devices) {
#ifdef __SANITIZE_THREAD__
  constexpr std::size_t kCount = 40'001;
#else
  constexpr std::size_t kCount = 150'001;
#endif
  Random random(7);
  const int n = 4;
  DeviceRanks ranks(devices, n, {2, 2304}, std::size_t{8} << 20);
  for (const Programs& programs : {one_shot(n), programs_of("direct", OpKind::kAllReduce, n),
                                   programs_of("halving_doubling", OpKind::kAllReduce, n),
                                   programs_of("direct", OpKind::kBroadcast, n)}) {
    Placed call(call_of(programs, kCount), 0, random);
    call.write(ranks);
    call.launch(ranks);
    ranks.synchronize();
    ranks.check_no_endings();
    call.check(ranks);
  }
}

// Groups at once, their ranks on the same devices in other orders.
void several_groups(Devices& devices) {
  Random random(8);
  const int n = 4;
  DeviceRanks a(devices, n, {2, 4096}, kMemory), b(devices, n, {2, 2304}, kMemory);
  DeviceRanks c(devices, 2, {1, 4096}, kMemory);
  struct Turn {
    DeviceRanks& ranks;
    Programs programs;
  };
  const Turn turns[] = {
      {a, one_shot(n)}, {b, programs_of("ring", OpKind::kAllReduce, n)}, {c, one_shot(2)}};
  std::vector<std::vector<Placed>> calls(3);
  for (std::size_t t = 0; t < 3; ++t)
    for (std::size_t i = 0; i < 5; ++i) {
      calls[t].emplace_back(call_of(turns[t].programs, 2000), 64 * 1024 * i, random);
      calls[t].back().write(turns[t].ranks);
    }
  // One group's ranks begin with the first, another's with the last.
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      DeviceRanks& ranks = turns[t].ranks;
      for (const Placed& each : calls[t])
        for (int i = 0; i < ranks.size(); ++i) {
          const int r = t == 1 ? ranks.size() - 1 - i : i;
          each.launch(ranks.at(r), r);
        }
    });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t t = 0; t < 3; ++t) {
    turns[t].ranks.synchronize();
    turns[t].ranks.check_no_endings();
    for (const Placed& each : calls[t]) each.check(turns[t].ranks);
  }
}

// All launch but one: the others say whom they have awaited, and do nothing any more.
void a_rank_that_never_launches(Devices& devices) {
  Random random(9);
  const int n = 4;
  DeviceRanks ranks(devices, n, {2, 4096}, kMemory);
  Placed call(call_of(one_shot(n), 3000), 0, random);
  call.write(ranks);
  for (const int r : {0, 1, 3}) call.launch(ranks.at(r), r, kSecond);
  ranks.synchronize(kSoon);
  for (const int r : {0, 1, 3}) {
    const auto ending = ranks.at(r).peers->ending();
    CHECK(ending && ending->why == cuda::Ending::kTimeout && ending->member == Member(2));
    CHECK(ending->block < 2);
  }
  CHECK(!ranks.at(2).peers->ending());
  // Poison is for good: what comes later does not wait, and touches nothing.
  for (int repeat = 0; repeat < 3; ++repeat) {
    call.draw(random);
    call.write(ranks);
    for (const int r : {0, 1, 3}) call.launch(ranks.at(r), r, 100 * kSecond);
    ranks.synchronize(kSoon);
    for (const int r : {0, 1, 3}) call.check_untouched(ranks, r);
  }
}

// A graph whose first replay ends in poison: the next ones do nothing, though the peer has come.
void poison_then_replays(Devices& devices) {
  Random random(10);
  DeviceRanks ranks(devices, 2, {2, 4096}, kMemory);
  Placed call(call_of(one_shot(2), 500), 0, random);
  for (int r = 0; r < 2; ++r)
    ranks.at(r).peers->upload(call.call().programs[static_cast<std::size_t>(r)]);
  const Graph graph(ranks.at(0), [&] { call.launch(ranks.at(0), 0, kSecond / 10); });
  call.write(ranks);
  graph.launch();
  ranks.synchronize();
  CHECK(ranks.at(0).peers->ending()->why == cuda::Ending::kTimeout);
  call.launch(ranks.at(1), 1, kSecond);  // it finds what was published
  ranks.synchronize();
  call.draw(random);
  call.write(ranks);
  for (int replay = 0; replay < 3; ++replay) graph.launch();
  ranks.synchronize(kSoon);
  call.check_untouched(ranks, 0);
  // The peer, which goes on, waits for it in vain.
  CHECK(!ranks.at(1).peers->ending());
  call.launch(ranks.at(1), 1, kSecond / 10);
  ranks.synchronize(kSoon);
  const auto ending = ranks.at(1).peers->ending();
  CHECK(ending && ending->why == cuda::Ending::kTimeout && ending->member == Member(0));
}

// The abort word ends waits soon, whatever their deadline is.
void abort_ends_waits(Devices& devices, const Programs& programs) {
  Random random(11);
  const int n = 4;
  DeviceRanks ranks(devices, n, {2, 4096}, kMemory);
  Placed call(call_of(programs, 3000), 0, random);
  call.write(ranks);
  for (const int r : {0, 1, 2}) call.launch(ranks.at(r), r, 60 * kSecond);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (const int r : {0, 1, 2}) ranks.at(r).peers->abort();
  ranks.synchronize(kSoon);
  for (const int r : {0, 1, 2}) {
    const auto ending = ranks.at(r).peers->ending();
    CHECK(ending && ending->why == cuda::Ending::kAborted && ending->member != Member(r));
  }
}

// A rank that comes much later than the others.
void a_late_rank(Devices& devices) {
  Random random(12);
  const int n = 4;
  DeviceRanks ranks(devices, n, {2, 2304}, kMemory);
  for (const Programs& programs : {one_shot(n), programs_of("ring", OpKind::kAllReduce, n)}) {
    Placed call(call_of(programs, 3000), 0, random);
    call.write(ranks);
    for (const int r : {3, 1, 0}) call.launch(ranks.at(r), r);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    call.launch(ranks.at(2), 2);
    ranks.synchronize();
    ranks.check_no_endings();
    call.check(ranks);
  }
}

}  // namespace
}  // namespace pycollective::testing

int main() {
  using namespace pycollective::testing;
  using pycollective::OpKind;
  Devices devices;
  Cases cases;
  cases.run("graphs replay, 2 ranks", [&] { graphs_replay(devices, 2, 0); });
  cases.run("graphs replay, 4 ranks", [&] { graphs_replay(devices, 4, 1); });
  cases.run("counters wrap", [&] { counters_wrap(devices); });
  cases.run("many calls, 8 ranks", [&] { many_calls(devices, 8, false); });
  cases.run("many calls, 4 ranks on one GPU", [&] { many_calls(devices, 4, true); });
  cases.run("larger than all slots", [&] { larger_than_all_slots(devices); });
  cases.run("several groups", [&] { several_groups(devices); });
  cases.run("a late rank", [&] { a_late_rank(devices); });
  cases.run("a rank that never launches", [&] { a_rank_that_never_launches(devices); });
  cases.run("poison, then replays", [&] { poison_then_replays(devices); });
  cases.run("abort ends waits, one-shot", [&] { abort_ends_waits(devices, one_shot(4)); });
  cases.run("abort ends waits, ring",
            [&] { abort_ends_waits(devices, programs_of("ring", OpKind::kAllReduce, 4)); });
  std::puts("cuda waits: passed");
  return 0;
}
