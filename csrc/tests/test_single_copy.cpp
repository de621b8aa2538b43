// Copies straight from a peer's memory: who waits for whom, and what ends them. Ranks are driven
// step by step by one thread, so that each order of steps is tested, and no luck is needed.
#include "engine/operations/single_copy.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/operations/input_place.h"
#include "engine/operations/point_to_point.h"
#include "tests/calls.h"
#include "tests/check.h"
#include "tests/inside.h"
#include "tests/thread_ranks.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

constexpr std::size_t kCount = 200'000;  // of a shard: two pieces
// With a root: as much as does not begin with slots.
constexpr std::size_t kBroadcast = 100'000;
constexpr std::size_t kRootedShard = 40'000;
constexpr float kUntouched = -1;
constexpr float kChanged = -2;

float value(int rank, std::size_t i) { return static_cast<float>((rank + 1) * 1000 + i % 997); }

// One rank's call, driven by the test's thread.
struct Rank {
  std::vector<float> input, output;
  Request request;
  std::unique_ptr<Task> task;
  std::unique_ptr<Operation> operation;
  bool done = false;
  Failure failure;
  bool over() const { return done || failure.kind != FailureKind::kNone; }
};

class Call {
 public:
  Call(OpKind kind, int ranks)
      : group_(ranks),
        kind_(kind),
        ranks_(static_cast<std::size_t>(ranks)),
        count_(kind == OpKind::kBroadcast                            ? kBroadcast
               : kind == OpKind::kGather || kind == OpKind::kScatter ? kRootedShard
                                                                     : kCount) {
    for (std::size_t r = 0; r < ranks_; ++r) {
      Rank& rank = ranks_of_[r];
      rank.request.kind = is_pair(kind) && r == 0 ? OpKind::kRecv : kind;
      const OperationTraits& traits = traits_of(rank.request.kind);
      rank.request.dtype = Dtype::kFloat32;
      rank.request.count = count_;
      const int number = static_cast<int>(r);
      rank.request.root = is_pair(kind) ? 1 - number : kRoot;
      rank.input.resize(elements_of(traits.input, rank.request, number, ranks));
      rank.output.assign(elements_of(traits.output, rank.request, number, ranks), kUntouched);
      for (std::size_t i = 0; i < rank.input.size(); ++i) rank.input[i] = value(number, i);
      rank.request.input = rank.input.data();
      rank.request.output = rank.output.data();
      rank.task = std::make_unique<Task>(rank.request);
      make_operation(number);
      rank.operation->start();
    }
  }

  Rank& operator[](int rank) { return ranks_of_[static_cast<std::size_t>(rank)]; }
  Group& group(int rank) { return group_[rank]->group(); }
  int size() const { return static_cast<int>(ranks_); }

  // Drives a rank on by one step, as Communicator::drive does.
  void step(int number) {
    Rank& rank = (*this)[number];
    if (rank.over()) return;
    rank.failure = failure_of([&] {
      try {
        rank.done = rank.operation->advance() == State::kDone;
        if (!rank.done) Watch::throw_if_failed(*rank.operation);
      } catch (const CollectiveFailure&) {
        throw;
      } catch (const std::exception& error) {
        throw CollectiveFailure(
            Failure::of_no_operation(FailureKind::kAborted, number, error.what()));
      }
    });
    if (rank.over()) change_input(number);  // as its caller may
  }
  void change_input(int rank) {
    auto& input = (*this)[rank].input;
    std::fill(input.begin(), input.end(), kChanged);
  }
  // Whether the rank's output is what the call is to give.
  bool is_right(int number) {
    const auto& output = (*this)[number].output;
    const bool gathers = kind_ == OpKind::kAllGather || kind_ == OpKind::kGather;
    for (std::size_t i = 0; i < output.size(); ++i) {
      const auto shard = static_cast<int>(i / count_);
      const std::size_t own = static_cast<std::size_t>(number) * count_;
      const float right = is_pair(kind_)                ? value(1, i)
                          : gathers                     ? value(shard, i % count_)
                          : kind_ == OpKind::kBroadcast ? value(kRoot, i)
                          : kind_ == OpKind::kScatter   ? value(kRoot, own + i)
                                                        : value(shard, own + i % count_);
      if (output[i] != right) return false;
    }
    return true;
  }

  static constexpr int kRoot = 1;

 private:
  void make_operation(int number) {
    Rank& rank = (*this)[number];
    Group& group = this->group(number);
    if (rank.request.kind == OpKind::kSend) {
      rank.operation = std::make_unique<Send>(group, *rank.task, 1);
    } else if (rank.request.kind == OpKind::kRecv) {
      rank.operation = std::make_unique<Receive>(group, *rank.task, 1);
    } else {
      CHECK(SingleCopy::fits(group, rank.request));
      rank.operation = std::make_unique<SingleCopy>(group, *rank.task, 1);
    }
  }

  const ThreadGroup group_;
  OpKind kind_;
  std::size_t ranks_;
  std::size_t count_;
  Rank ranks_of_[3];
};

// kSend: from rank 1 to rank 0.
constexpr OpKind kKinds[] = {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kGather,
                             OpKind::kScatter,   OpKind::kAllToAll,  OpKind::kSend};

// Returns the steps that were needed. Each rank changes its input as soon as its call is over.
int run_all(OpKind kind, int ranks, int first) {
  Call call(kind, ranks);
  int steps = 0;
  for (bool all = false; !all; ++steps) {
    call.step((first + steps) % ranks);
    all = true;
    for (int r = 0; r < ranks; ++r) all = all && call[r].over();
    CHECK(steps < 1000);
  }
  for (int r = 0; r < ranks; ++r) CHECK(call[r].done && call.is_right(r));
  return steps;
}

// A rank fails before some step, its caller changes its input at once, and then the others go on:
// none ever takes what was changed for its result.
void fails_before_step(OpKind kind, int ranks, int failing, int when) {
  Call call(kind, ranks);
  for (int i = 0; i < when; ++i) call.step(i % ranks);
  if (call[failing].over()) return;
  call.group(failing).fail(FailureKind::kAborted, "planted");
  call[failing].failure = {FailureKind::kAborted, failing, kind, 1, "planted"};
  call.change_input(failing);
  for (int i = 0; i < 100; ++i) call.step(i % ranks);
  for (int r = 0; r < ranks; ++r) {
    CHECK(call[r].over());
    CHECK(call[r].done ? call.is_right(r) : call[r].failure.kind == FailureKind::kAborted);
  }
}

// Runs a rank until it needs what comes next of another one.
void drive(Call& call, int rank) {
  for (int i = 0; i < 100; ++i) call.step(rank);
}

// A process that has mapped what `mapped` says, and does nothing.
pid_t start_idler(void* mapped) {
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) _exit(1);  // also where a check fails
    constexpr int kFixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mapped != nullptr && mmap(mapped, kPage, PROT_READ | PROT_WRITE, kFixed, -1, 0) != mapped)
      _exit(1);
    if (write(ready[1], "", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte;
  CHECK(read(ready[0], &byte, 1) == 1);
  close(ready[0]);
  close(ready[1]);
  return child;
}

void end(pid_t child) {
  CHECK(kill(child, SIGKILL) == 0);
  CHECK(waitpid(child, nullptr, 0) == child);
}

// The first place in `memory` that lies so far behind `from` modulo a page.
std::byte* behind(std::vector<std::byte>& memory, const void* from, std::size_t distance) {
  const auto number = [](const void* each) { return reinterpret_cast<std::uintptr_t>(each); };
  return memory.data() + (number(from) + distance - number(memory.data())) % kPage;
}

// Rank 0 copies from rank 1, which is another process here.
Failure failure_with(OpKind kind, pid_t process, const std::function<void()>& before_read,
                     std::size_t distance = 0) {
  Call call(kind, 2);
  std::vector<std::byte> output(2 * kCount * sizeof(float) + kPage);
  call[0].request.output = behind(output, call[1].input.data(), distance);
  for (int r = 0; r < 2; ++r) call.group(r).set_reading(Group::Reading::kAllowed);
  Inside::set_process(call.group(0), Member(1), process, 0);
  before_read();
  drive(call, 0);
  return call[0].failure;
}

void a_sender_that_cannot_be_read_is_named() {
  const pid_t idler = start_idler(nullptr);
  const Failure failure = failure_with(OpKind::kSend, idler, [] {});
  CHECK(failure.kind == FailureKind::kAborted);
  CHECK(contains(failure.message, "the memory of rank 1 (pid " + std::to_string(idler)));
  CHECK(contains(failure.message, "process_vm_readv: Bad address (errno 14)"));
  end(idler);
}

// One rank cannot read another one's memory: all go on through slots, also those that could, which
// copy no more for nothing.
void a_read_that_is_refused(OpKind kind, int ranks) {
  const pid_t idler = start_idler(nullptr);
  Call call(kind, ranks);
  for (int r = 0; r < ranks; ++r) call.group(r).set_reading(Group::Reading::kAllowed);
  const int from = kind == OpKind::kGather ? 0 : 1;
  Inside::set_process(call.group(1 - from), Member(from), idler, 0);
  drive(call, 1 - from);
  if (kind == OpKind::kAllGather) {  // of which another rank copies two pieces and more
    call.step(from);
    CHECK(call.group(from).own().progress.combined == 1);
  }
  for (int i = 0; i < 1000; ++i) call.step(i % ranks);
  for (int r = 0; r < ranks; ++r) CHECK(call[r].done && call.is_right(r));
  end(idler);
}

void one_that_was_killed_is_lost(OpKind kind, std::size_t distance) {
  const pid_t idler = start_idler(nullptr);
  const Failure failure = failure_with(kind, idler, [&] { end(idler); }, distance);
  CHECK(failure.kind == FailureKind::kPeerFailure);
  CHECK(contains(failure.message, "rank 1 (pid " + std::to_string(idler) + ") died"));
}

// A process that dies loses its memory before it has ended.
void a_sender_that_dies_after_its_memory_is_lost(std::size_t distance) {
  const pid_t idler = start_idler(nullptr);
  std::thread killer;
  const auto before_read = [&] {
    killer = std::thread([idler] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the first read comes before
      kill(idler, SIGKILL);
    });
  };
  const Failure failure = failure_with(OpKind::kSend, idler, before_read, distance);
  killer.join();
  CHECK(waitpid(idler, nullptr, 0) == idler);
  CHECK(failure.kind == FailureKind::kPeerFailure);
}

// Wherever a peer says that its header lies: here the token is cut off by the end of its memory.
void a_token_that_ends_outside_memory() {
  const ThreadGroup group(2);
  Group& reader = group[0]->group();
  void* const memory = mmap(nullptr, 2 * kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  const auto end = reinterpret_cast<std::uintptr_t>(memory) + kPage;
  CHECK(mprotect(reinterpret_cast<void*>(end), kPage, PROT_NONE) == 0);
  auto* header = reinterpret_cast<SegmentHeader*>(reader.segment_of(Member(1), 0));
  const std::uint64_t right = header->address;
  header->address = end - sizeof(Token) / 2 - offsetof(SegmentHeader, token);
  alarm(30);  // it would read for ever
  std::byte to[8];
  for (const std::size_t bytes : {std::size_t{0}, sizeof(to)})
    CHECK(reader.read(Member(1), to, end - sizeof(to), bytes) == EFAULT);
  alarm(0);
  header->address = right;
  munmap(memory, 2 * kPage);
}

// What is read is right, and nothing beside it is written, also where Linux would copy by bytes.
void a_read_of_any_distance() {
  const ThreadGroup group(2);
  Group& reader = group[0]->group();
  constexpr std::size_t kMost = 300'001;  // three staging pieces
  std::vector<std::byte> source(kMost), target(kMost + 2 * kPage);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = std::byte(i * 7 + i / 256);
  const auto from = reinterpret_cast<std::uintptr_t>(source.data());
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{5000}, kMost})
    for (std::size_t distance = 0; distance < 70; ++distance) {
      std::fill(target.begin(), target.end(), std::byte{0xee});
      std::byte* const to = behind(target, source.data(), distance);
      CHECK(reader.read(Member(1), to, from, bytes) == 0);
      CHECK(std::equal(to, to + bytes, source.begin()));
      const auto untouched = [](std::byte each) { return each == std::byte{0xee}; };
      CHECK(std::all_of(target.data(), to, untouched));
      CHECK(std::all_of(to + bytes, target.data() + target.size(), untouched));
    }
}

// Another process may have its pid: its memory is not taken for the peer's.
void another_process_with_its_pid_is_not_read() {
  Call call(OpKind::kAllGather, 2);
  for (int r = 0; r < 2; ++r) call.group(r).set_reading(Group::Reading::kAllowed);
  const std::byte* header = call.group(0).segment_of(Member(1), 0);
  const pid_t other = start_idler(const_cast<std::byte*>(header));
  Inside::set_process(call.group(0), Member(1), other, 0);
  drive(call, 0);
  CHECK(call[0].failure.kind == FailureKind::kPeerFailure);
  end(other);
}

// Memory that other processes cannot read goes through slots, on all ranks: also where they could
// read what lay there before.
void input_that_cannot_be_read(OpKind kind) {
  const ThreadGroup group(2);
  const std::size_t bytes = kCount * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED && is_readable(memory, bytes));
  auto* input = static_cast<float*>(memory);
  for (std::size_t i = 0; i < kCount; ++i) input[i] = value(0, i);
  group.run([&](int r) {
    std::vector<float> x(kCount);
    for (std::size_t i = 0; i < kCount; ++i) x[i] = value(r, i);
    std::vector<float> y(kind == OpKind::kAllGather ? 2 * kCount : kCount);
    Request request = all_reduce(x);
    request.kind = is_pair(kind) && r == 1 ? OpKind::kRecv : kind;
    request.root = is_pair(kind) ? 1 - r : 0;
    request.input = r == 0 ? input : x.data();
    request.output = y.data();
    for (int turn = 0; turn < 3; ++turn) {
      if (r == 0 && turn == 1) CHECK(mprotect(memory, bytes, PROT_WRITE) == 0);
      if (r == 0 && turn == 2) request.input = x.data();
      CHECK(r == 1 || is_readable(request.input, bytes) == (turn != 1));
      group[r]->run(request, {});
      for (std::size_t i = 0; request.kind != OpKind::kSend && i < y.size(); ++i)
        CHECK(y[i] == value(static_cast<int>(i / kCount), i % kCount));
      std::fill(y.begin(), y.end(), kUntouched);
    }
    CHECK(is_pair(kind) || group[r]->group().reading() == Group::Reading::kAllowed);
  });
  munmap(memory, bytes);
}

// Each rank's input lies in a shared array or elsewhere, small or not: each reads each where it is.
void inputs_of_every_place() {
  constexpr int kRanks = 3;
  constexpr OpKind kMoving[] = {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kGather,
                                OpKind::kScatter, OpKind::kAllToAll};
  const ThreadGroup group(kRanks);
  group.run([&](int r) {
    const auto array = group[r]->allocate(kRanks * 5000 * sizeof(float));
    std::vector<float> ordinary(kRanks * 5000);
    for (const OpKind kind : kMoving)
      for (const std::size_t count : {std::size_t{600}, std::size_t{2000}, std::size_t{5000}})
        for (unsigned shared = 0; shared < 1u << kRanks; ++shared) {
          auto* input =
              (shared >> r & 1) != 0 ? reinterpret_cast<float*>(array.get()) : ordinary.data();
          std::vector<float> output(kRanks * count, kUntouched);
          for (std::size_t i = 0; i < kRanks * count; ++i) input[i] = value(r, i);
          Request request;
          request.kind = kind;
          request.dtype = Dtype::kFloat32;
          request.count = count;
          request.root = 1;
          request.input = input;
          request.output = kind == OpKind::kBroadcast && r == 1 ? input : output.data();
          group[r]->run(request, {});
          std::fill(input, input + kRanks * count, kChanged);  // as its caller may
          const OperationTraits& traits = traits_of(kind);
          const std::size_t own = static_cast<std::size_t>(r) * count;
          for (std::size_t i = 0; i < elements_of(traits.output, request, r, kRanks); ++i) {
            const int from =
                traits.rooted && kind != OpKind::kGather ? 1 : static_cast<int>(i / count);
            const bool takes_own = traits.input.holds == Holds::kAllShards;
            CHECK(output[i] == value(from, i % count + (takes_own ? own : 0)));
          }
        }
  });
}

// Where the last rank calls, nothing is left to a thread of the library.
void a_small_message_ends_with_the_last_call() {
  const ThreadGroup group(2);
  std::vector<float> x(16000, 1.0F);
  std::vector<float> y(16000);
  std::vector<float> z(16000);
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kBroadcast, OpKind::kAllToAll}) {
    Request request;
    request.kind = kind;
    request.dtype = Dtype::kFloat32;
    request.count = kind == OpKind::kAllToAll ? 4000 : 8000;
    request.input = x.data();
    request.output = y.data();
    const auto first = group[1]->submit(request, nullptr);
    request.output = kind == OpKind::kBroadcast ? x.data() : z.data();
    CHECK(group[0]->submit(request, nullptr)->done());
    await([&] { return first->done(); });
  }
}

// Past the caches: read from shared arrays, and through slots.
void results_that_no_cache_holds() {
  const ThreadGroup group(2);
  group.run([&](int r) {
    const std::size_t count = (std::size_t{24} << 20) / sizeof(float) + 17;
    for (const OpKind kind : {OpKind::kAllGather, OpKind::kGather}) {
      const auto array = group[r]->allocate(count * sizeof(float));
      std::vector<float> ordinary(kind == OpKind::kGather ? count : 0);
      auto* input = ordinary.empty() ? reinterpret_cast<float*>(array.get()) : ordinary.data();
      for (std::size_t i = 0; i < count; ++i) input[i] = value(r, i);
      std::vector<float> output(2 * count, kUntouched);
      Request request;
      request.kind = kind;
      request.dtype = Dtype::kFloat32;
      request.count = count;
      request.input = input;
      request.output = output.data();
      group[r]->run(request, {});
      if (kind == OpKind::kGather && r != 0) continue;
      for (std::size_t i = 0; i < output.size(); ++i)
        CHECK(output[i] == value(static_cast<int>(i / count), i % count));
    }
  });
}

// What no honest rank says of its input ends the call on all ranks.
void a_rank_that_lies_about_its_input() {
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kBroadcast})
    for (const std::uint64_t word : {kNoInput, kInSmallBuffer, std::uint64_t{4096}}) {
      Call call(kind, 2);
      for (int r = 0; r < 2; ++r) call.group(r).mailbox(Member(1)).arrival[1].input = word;
      for (int i = 0; i < 1000; ++i) call.step(i % 2);
      for (int r = 0; r < 2; ++r) CHECK(call[r].over() && (!call[r].done || call.is_right(r)));
    }
}

}  // namespace

int main() {
  for (const OpKind kind : kKinds)
    for (int ranks = 2; ranks <= (is_pair(kind) ? 2 : 3); ++ranks) {
      for (int first = 1; first < ranks; ++first) run_all(kind, ranks, first);
      const int steps = run_all(kind, ranks, 0);
      for (int failing = 0; failing < ranks; ++failing)
        for (int when = 0; when < steps; ++when) fails_before_step(kind, ranks, failing, when);
      if (!is_pair(kind)) a_read_that_is_refused(kind, ranks);
    }
  a_sender_that_cannot_be_read_is_named();
  for (const std::size_t distance : {0, 8}) a_sender_that_dies_after_its_memory_is_lost(distance);
  another_process_with_its_pid_is_not_read();
  a_token_that_ends_outside_memory();
  a_read_of_any_distance();
  a_rank_that_lies_about_its_input();
  inputs_of_every_place();
  a_small_message_ends_with_the_last_call();
  results_that_no_cache_holds();
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kSend}) {
    for (const std::size_t distance : {0, 8}) one_that_was_killed_is_lost(kind, distance);
    input_that_cannot_be_read(kind);
  }
  std::puts("single copy: passed");
}
