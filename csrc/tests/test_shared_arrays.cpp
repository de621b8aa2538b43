// Arrays that peers read in place: their memory, and the operations on them.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

#include "engine/operations/single_copy.h"
#include "engine/watch.h"
#include "shared_memory/array_heap.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

void allow(std::size_t) {}

// Bytes of a segment that Linux holds.
std::size_t committed(const Segment& segment) {
  struct stat status{};
  CHECK(fstat(segment.fd(), &status) == 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

void memory_is_committed_and_freed_with_the_last_share() {
  const auto segment = Segment::create();
  const auto heap = std::make_shared<ArrayHeap>(segment);
  const std::size_t before = committed(*segment);
  auto one = heap->allocate(40 * kMiB, allow);
  const auto other = heap->allocate(1, allow);
  CHECK(committed(*segment) >= before + 40 * kMiB);
  CHECK(reinterpret_cast<std::uintptr_t>(one.get()) % kPage == 0);
  auto share = one;
  const std::byte* const at = one.get();
  one.reset();
  CHECK(committed(*segment) >= before + 40 * kMiB);
  share.reset();
  CHECK(committed(*segment) <= before + 2 * kPage);
  // The same place serves again, the other array's does not.
  *other = std::byte{7};
  one = heap->allocate(40 * kMiB, allow);
  CHECK(one.get() == at);
  std::memset(one.get(), 1, 40 * kMiB);
  CHECK(*other == std::byte{7});
}

// Without the signal that ends processes, for the first segment and for a further region.
void a_limit_of_file_sizes_is_named() {
  const auto segment = Segment::create();
  rlimit usual{};
  CHECK(getrlimit(RLIMIT_FSIZE, &usual) == 0);
  const rlimit small{200 * kMiB, usual.rlim_max};
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const auto refusal_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::system_error& error) {
      return error.what();
    }
    return "none";
  };
  CHECK(contains(refusal_of([] { Segment::create(); }), "may have 200 MiB: raise the limit"));
  CHECK(contains(refusal_of([&] { segment->add_region(kMiB); }), "or of files (ulimit -f)"));
  CHECK(setrlimit(RLIMIT_FSIZE, &usual) == 0);
}

// Regions are few although each is as large as what needs it.
void large_arrays_add_regions() {
  const auto segment = Segment::create();
  const auto heap = std::make_shared<ArrayHeap>(segment);
  std::vector<std::shared_ptr<std::byte>> all;
  for (int i = 0; i < 24; ++i) {
    all.push_back(heap->allocate(30 * kMiB, allow));
    std::memset(all.back().get(), i, kPage);
    all.back().get()[30 * kMiB - 1] = std::byte(i);
    segment->free_array(*segment->array_offset(all.back().get() + kPage, 1), 29 * kMiB);
  }
  int regions = 0;
  for (const auto& end : segment->header().region_ends) {
    regions += end != 0 ? 1 : 0;
    CHECK(end % kRegionStep == 0);
  }
  CHECK(regions <= 6);
  for (int i = 0; i < 24; ++i)
    CHECK(all[i].get()[5] == std::byte(i) && all[i].get()[30 * kMiB - 1] == std::byte(i));
}

void regions_are_counted() {
  const auto segment = Segment::create();
  for (std::size_t i = 0; i < kMostRegions; ++i) segment->add_region(1);
  try {
    segment->add_region(1);
    CHECK(false);
  } catch (const std::system_error& error) {
    CHECK(contains(error.what(), "regions of this process's shared memory are in use"));
  }
}

void an_allocation_that_is_refused_leaves_nothing() {
  const auto segment = Segment::create();
  const auto heap = std::make_shared<ArrayHeap>(segment);
  const std::size_t before = committed(*segment);
  int pieces = 0;
  const auto refuse_third = [&](std::size_t) {
    if (++pieces == 3) throw std::runtime_error("no more");
  };
  try {
    heap->allocate(200 * kMiB, refuse_third);
    CHECK(false);
  } catch (const std::runtime_error&) {
  }
  CHECK(pieces == 3 && committed(*segment) <= before + kPage);
  try {
    heap->allocate(std::size_t{1} << 60, allow);
    CHECK(false);
  } catch (const std::system_error& error) {
    CHECK(contains(error.what(), "raise the limit of addresses (ulimit -v)"));
  }
  CHECK(heap->allocate(kMiB, allow) != nullptr);
}

// A mapping of its own, as another process has it.
void a_peer_maps_what_is_there_and_nothing_else() {
  const auto own = Segment::create();
  const auto peer = Segment::attach(own->fd(), own->token());
  CHECK(peer->array_at(kSegmentBytes, 1) == nullptr);
  const auto heap = std::make_shared<ArrayHeap>(own);
  const auto small = heap->allocate(kMiB, allow);
  const auto large = heap->allocate(300 * kMiB, allow);
  for (const auto& [array, bytes] : {std::pair{small, kMiB}, std::pair{large, 300 * kMiB}}) {
    array.get()[bytes - 1] = std::byte{42};
    const auto offset = own->array_offset(array.get(), bytes);
    CHECK(offset && own->array_at(*offset, bytes) == array.get());
    const std::byte* seen = peer->array_at(*offset, bytes);
    CHECK(seen != nullptr && seen != array.get() && seen[bytes - 1] == std::byte{42});
  }
  std::vector<std::byte> elsewhere(10);
  CHECK(!own->array_offset(elsewhere.data(), 10));
  CHECK(!own->array_offset(small.get(), 64 * kMiB));  // beyond its region
  std::uint64_t end = 0;
  for (const auto& each : own->header().region_ends) end = std::max<std::uint64_t>(end, each);
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{kPage}, end, end - kPage,
                                     ~std::uint64_t{0}, std::uint64_t{1} << 62})
    CHECK(peer->array_at(offset, 2 * kPage) == nullptr);
  CHECK(peer->array_at(kSegmentBytes, ~std::size_t{0}) == nullptr);
}

// What a peer writes of its regions may be anything.
void a_forged_region_is_not_mapped() {
  for (const std::uint64_t end :
       {std::uint64_t{kPage}, std::uint64_t{kSegmentBytes}, kSegmentBytes + kRegionStep,
        kSegmentBytes + kPage, kSegmentBytes + kRegionStep + 1, std::uint64_t{1} << 50,
        ~std::uint64_t{0}}) {
    const auto own = Segment::create();
    const auto peer = Segment::attach(own->fd(), own->token());
    own->header().region_ends[0] = end;
    CHECK(peer->array_at(kSegmentBytes, 1) == nullptr);
  }
}

void a_forked_child_keeps_and_frees_nothing() {
  const auto own = Segment::create();
  const auto peer = Segment::attach(own->fd(), own->token());
  const auto heap = std::make_shared<ArrayHeap>(own);
  auto array = heap->allocate(kMiB, allow);
  *array = std::byte{9};
  const std::uint64_t offset = *own->array_offset(array.get(), 1);
  CHECK(*peer->array_at(offset, 1) == std::byte{9});
  const pid_t child = fork();
  if (child == 0) {
    array.reset();  // the parent's: nothing is unmapped or punched
    int kept = 0;
    char target[64] = {};
    for (int fd = 3; fd < 256; ++fd) {
      const std::string link = "/proc/self/fd/" + std::to_string(fd);
      const ssize_t length = readlink(link.c_str(), target, sizeof(target) - 1);
      kept += length > 0 && contains(std::string(target, length), "memfd:pycollective") ? 1 : 0;
    }
    _exit(kept);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(*array == std::byte{9});
}

// Ranks with an array each.
struct Arrays {
  explicit Arrays(const ThreadGroup& group, std::size_t bytes) {
    for (int r = 0; r < group.size(); ++r) all.push_back(group[r]->allocate(bytes));
  }
  float* operator[](int rank) const {
    return reinterpret_cast<float*>(all[static_cast<std::size_t>(rank)].get());
  }
  std::vector<std::shared_ptr<std::byte>> all;
};

float value(int rank, std::size_t i) { return static_cast<float>(rank * 31 + 1 + i % 1009); }

float sum_of(int ranks, std::size_t i) {
  float sum = 0;
  for (int r = 0; r < ranks; ++r) sum += value(r, i);
  return sum;
}

Request call(OpKind kind, std::size_t count, const float* input, float* output) {
  Request request;
  request.kind = kind;
  request.dtype = Dtype::kFloat32;
  request.count = count;
  request.input = input;
  request.output = output;
  return request;
}

// The input stays; the result goes to memory of any kind, or to the own shard of the input.
// `own`: a rank whose array is its own memory; all then go another way. -1: none.
void reduce_scatters(int ranks, int own) {
  const ThreadGroup group(ranks);
  constexpr std::size_t kMost = 400000;
  const Arrays arrays(group, kMost * static_cast<std::size_t>(ranks) * sizeof(float));
  group.run([&](int r) {
    for (const std::size_t count : {std::size_t{20011}, kMost})
      for (const bool in_place : {false, true}) {
        const std::size_t total = count * static_cast<std::size_t>(ranks);
        std::vector<float> mine(own == r ? total : 0);
        float* x = own == r ? mine.data() : arrays[r];
        for (std::size_t i = 0; i < total; ++i) x[i] = value(r, i);
        std::vector<float> out(count);
        const std::size_t begin = count * static_cast<std::size_t>(r);
        float* y = in_place ? x + begin : out.data();
        const auto& combined = group[r]->group().own().progress.combined;
        const std::uint64_t before = combined;
        group[r]->run(call(OpKind::kReduceScatter, count, x, y), {});
        if (own < 0 && count == kMost) CHECK(combined - before == 1);  // through slots many
        for (std::size_t i = 0; i < count; ++i) CHECK(y[i] == sum_of(ranks, begin + i));
        for (std::size_t i = 0; i < total; ++i)
          CHECK((in_place && i - begin < count) || x[i] == value(r, i));
      }
  });
}

// Operations that only move: as single copies by loads if all inputs lie in arrays, also if ptrace
// is forbidden; else in whatever way serves all.
void moves(int own, bool forbidden) {
  constexpr int kRanks = 3;
  constexpr int kRoot = 1;
  constexpr std::size_t kCount = 50021;
  const ThreadGroup group(kRanks);
  const Arrays arrays(group, kRanks * kCount * sizeof(float));
  if (forbidden) Inside::set_process(group[0]->group(), Member(2), 0);
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kGather,
                            OpKind::kScatter, OpKind::kAllToAll}) {
    const std::uint64_t before = group[0]->group().own().progress.combined;
    group.run([&](int r) {
      const OperationTraits& traits = traits_of(kind);
      Request request = call(kind, kCount, nullptr, nullptr);
      request.root = kRoot;
      const std::size_t given = elements_of(traits.input, request, r, kRanks);
      std::vector<float> mine(own == r ? given : 0);
      std::vector<float> out(elements_of(traits.output, request, r, kRanks));
      float* x = own == r ? mine.data() : arrays[r];
      for (std::size_t i = 0; i < given; ++i) x[i] = value(r, i);
      request.input = given != 0 ? x : nullptr;
      request.output = out.data();
      group[r]->run(request, {});
      for (std::size_t i = 0; i < out.size(); ++i) {
        const int shard = static_cast<int>(i / kCount);
        const std::size_t mine_begin = static_cast<std::size_t>(r) * kCount;
        const bool gathers = kind == OpKind::kAllGather || kind == OpKind::kGather;
        CHECK(out[i] == (gathers                      ? value(shard, i % kCount)
                         : kind == OpKind::kBroadcast ? value(kRoot, i)
                         : kind == OpKind::kScatter   ? value(kRoot, mine_begin + i)
                                                      : value(shard, mine_begin + i % kCount)));
      }
    });
    const bool one_step = group[0]->group().own().progress.combined == before + 1;
    CHECK(own >= 0 || one_step);
  }
}

// One rank's reduce-scatter, driven step by step by the test's thread.
struct Driven {
  Driven(Communicator& comm, float* x, std::size_t count)
      : output(count),
        request(call(OpKind::kReduceScatter, count, x, output.data())),
        task(request),
        operation(comm.group(), task, 1) {
    operation.start();
  }
  void step() {
    if (done || failure.kind != FailureKind::kNone) return;
    failure = failure_of([&] {
      done = operation.advance() == State::kDone;
      if (!done) Watch::throw_if_failed(operation);
    });
  }
  std::vector<float> output;
  Request request;
  Task task;
  SingleCopy operation;
  bool done = false;
  Failure failure;
};

// A rank ends, well or before some step badly, and its caller changes its array at once: no other
// rank ever takes what was changed for its result. Returns whether the failing one was still at it.
bool changes_after_its_end(int ranks, int failing, int when) {
  constexpr std::size_t kCount = 100'000;
  const ThreadGroup group(ranks);
  const std::size_t total = kCount * static_cast<std::size_t>(ranks);
  const Arrays arrays(group, total * sizeof(float));
  std::vector<std::unique_ptr<Driven>> driven;
  for (int r = 0; r < ranks; ++r) {
    for (std::size_t i = 0; i < total; ++i) arrays[r][i] = value(r, i);
    driven.push_back(std::make_unique<Driven>(*group[r], arrays[r], kCount));
  }
  std::vector<bool> seen(static_cast<std::size_t>(ranks));
  const auto look = [&](int r) {
    if (!driven[r]->done || seen[r]) return;
    seen[r] = true;
    for (std::size_t i = 0; i < kCount; ++i)
      CHECK(driven[r]->output[i] == sum_of(ranks, static_cast<std::size_t>(r) * kCount + i));
    std::fill_n(arrays[r], total, -1.0F);
  };
  for (int i = 0; i < when; ++i) {
    driven[i % ranks]->step();
    look(i % ranks);
  }
  const bool at_it = !driven[failing]->done;
  if (at_it) {
    group[failing]->group().fail(FailureKind::kAborted, "planted");
    driven[failing]->failure.kind = FailureKind::kAborted;
    std::fill_n(arrays[failing], total, -2.0F);
  }
  for (int i = 0; i < 200; ++i) {
    driven[i % ranks]->step();
    look(i % ranks);
  }
  for (int r = 0; r < ranks; ++r)
    CHECK(driven[r]->done || (at_it && driven[r]->failure.kind == FailureKind::kAborted));
  return at_it;
}

// An offset that leads nowhere ends the call on all ranks, and no rank reads there.
void a_forged_offset_is_a_failure() {
  const ThreadGroup group(2);
  const Arrays arrays(group, 2 * kMiB);
  Mailbox& mailbox = group[1]->group().own();
  group.run([&](int r) {
    const Request request =
        call(OpKind::kReduceScatter, kMiB / 4, arrays[r], arrays[r] + r * (kMiB / 4));
    if (r == 0) {
      await([&] { return mailbox.arrival[1].sequence == 1; });
      mailbox.arrival[1].input = std::uint64_t{1} << 63 | std::uint64_t{1} << 50;
    }
    const Failure failure = failure_of([&] { group[r]->run(request, {}); });
    CHECK(failure.kind == FailureKind::kAborted);
    CHECK(contains(failure.message, "does not lie in its shared memory"));
  });
}

}  // namespace

int main() {
  memory_is_committed_and_freed_with_the_last_share();
  a_limit_of_file_sizes_is_named();
  large_arrays_add_regions();
  regions_are_counted();
  an_allocation_that_is_refused_leaves_nothing();
  a_peer_maps_what_is_there_and_nothing_else();
  a_forged_region_is_not_mapped();
  a_forked_child_keeps_and_frees_nothing();
  for (const int ranks : {2, 3, 5})
    for (const int own : {-1, 1}) reduce_scatters(ranks, own);
  for (const int own : {-1, 0, 1})
    for (const bool forbidden : {false, true}) moves(own, forbidden);
  for (const int ranks : {2, 3})
    for (int failing = 0; failing < ranks; ++failing)
      for (int when = 0; changes_after_its_end(ranks, failing, when); ++when) CHECK(when < 100);
  a_forged_offset_is_a_failure();
  std::puts("shared arrays: passed");
}
