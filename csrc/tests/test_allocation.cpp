// A synchronous call allocates nothing: neither small nor large, neither reducing nor moving. What
// is refused leaves nothing behind. A rank tells of a failure without memory, too.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/thread_ranks.h"

namespace {
std::atomic<long> allocations{0};
std::atomic<long> freed{0};
thread_local bool out_of_memory = false;
}  // namespace

// Not inlined: the compiler would pair malloc with delete, and warn.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ++allocations;
  if (out_of_memory) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  freed += memory != nullptr ? 1 : 0;
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  freed += memory != nullptr ? 1 : 0;
  std::free(memory);
}

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// Whatever the tag: there may be ever new ones.
void refused_calls_leave_nothing() {
  const ThreadGroup group(2);
  group[0]->abort("enough");
  Request request;
  request.kind = OpKind::kSend;
  request.root = 1;
  const auto refuse = [&](int tag) {
    request.tag = tag;
    for (const bool waits : {true, false}) try {
        waits ? group[0]->run(request, {}) : static_cast<void>(group[0]->submit(request, {}));
        CHECK(false);
      } catch (const CollectiveFailure&) {
      }
  };
  refuse(1);
  const long before = allocations - freed;
  for (int tag = 2; tag < 300; ++tag) refuse(tag);
  CHECK(allocations - freed == before);
}

// A rank's call fails, and there is no memory to say why: its peers hear of it all the same, and
// its queue is free again.
void fails_without_memory(bool waits) {
  const ThreadGroup group(2);
  std::vector<float> x(300000, 1.0F);
  std::vector<float> y(2 * x.size());
  Request request;
  request.kind = OpKind::kAllGather;
  request.dtype = Dtype::kFloat32;
  request.count = x.size();
  request.input = x.data();
  request.output = y.data();
  const InterruptHook interrupted = [] { return out_of_memory = true; };
  const auto work = waits ? nullptr : group[1]->submit(request, nullptr);
  bool ended = false;
  try {
    waits ? group[1]->run(request, interrupted) : static_cast<void>(work->wait(0, interrupted));
  } catch (const std::bad_alloc&) {
    ended = true;
  }
  out_of_memory = false;
  CHECK(ended);
  CHECK(group[0]->group().failure().kind == FailureKind::kAborted);
  for (int r = 0; r < 2; ++r)
    CHECK(failure_of([&] { group[r]->run(request, {}); }).kind == FailureKind::kAborted);
  if (work) CHECK(failure_of([&] { work->wait(0, {}); }).kind == FailureKind::kAborted);
}

// The same on the progress thread, which goes on.
void fails_without_memory_on_the_progress_thread() {
  const ThreadGroup group(2);
  const Request barrier;
  const auto first = group[0]->submit(barrier, [](const Failure*) { out_of_memory = true; });
  const auto second = group[0]->submit(barrier, [](const Failure*) { out_of_memory = false; });
  group[1]->run(barrier, {});
  await([&] { return second->done(); });
  CHECK(first->failure() == nullptr && second->failure()->kind == FailureKind::kAborted);
  CHECK(second->failure()->sequence == 2);
  for (int r = 0; r < 2; ++r)
    CHECK(failure_of([&] { group[r]->run(barrier, {}); }).kind == FailureKind::kAborted);
}

// Its peers wait for the call of its number.
void a_call_that_finds_no_memory_fails_the_group() {
  const ThreadGroup group(2);
  const Request barrier;
  bool ended = false;
  out_of_memory = true;
  try {
    group[0]->submit(barrier, nullptr);
  } catch (const std::bad_alloc&) {
    ended = true;
  }
  out_of_memory = false;
  CHECK(ended);
  for (int r = 0; r < 2; ++r)
    CHECK(failure_of([&] { group[r]->run(barrier, {}); }).kind == FailureKind::kAborted);
}

// Whoever waits for an operation hears of its failure, though there is no memory to keep the text.
void an_operation_ends_without_memory() {
  const ThreadGroup group(1);
  const Request request;
  Pending pending(group[0]->shared_from_this(), Task(request), 3, 60, nullptr);
  const Failure failure{FailureKind::kTimeout, 0, OpKind::kBarrier, 3, std::string(100, 'x')};
  out_of_memory = true;
  pending.finish(&failure);
  out_of_memory = false;
  CHECK(pending.done() && pending.failure()->kind == FailureKind::kTimeout);
  const Failure told = failure_of([&] { pending.wait(0, {}); });
  CHECK(told.kind == FailureKind::kTimeout && told.sequence == 3);
}

}  // namespace

int main() {
  an_operation_ends_without_memory();
  refused_calls_leave_nothing();
  for (const bool waits : {true, false}) fails_without_memory(waits);
  fails_without_memory_on_the_progress_thread();
  a_call_that_finds_no_memory_fails_the_group();
  const ThreadGroup group(3);
  std::atomic<long> during{-1};
  group.run([&](int r) {
    std::vector<float> x(300000, 1.0F);
    std::vector<float> y(3 * x.size());
    Request barrier;
    group[r]->run(barrier, {});
    const long before = allocations;
    for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, x.size()})
      for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kAllGather,
                                OpKind::kBroadcast, OpKind::kAllToAll}) {
        Request request;
        request.kind = kind;
        request.dtype = Dtype::kFloat32;
        request.count = kind == OpKind::kAllToAll ? count / 3 : count;
        request.input = x.data();
        request.output = kind == OpKind::kBroadcast ? x.data() : y.data();
        group[r]->run(request, {});
      }
    group[r]->run(barrier, {});
    if (r == 0) during = allocations - before;
    group[r]->run(barrier, {});
  });
  CHECK(during == 0);
  std::puts("allocation: passed");
}
