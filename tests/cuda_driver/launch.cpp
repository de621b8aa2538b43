// Compiled without TSan: fibers share all of this, and TSan takes each for a thread. What orders
// them is said by hand: a block's start, its barriers, its end.
#include "launch.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <vector>

#include "fibers.h"
#include "memory.h"
#include "sanitizers.h"

namespace standin {
namespace {

constexpr std::size_t kSharedBytes = 49152;
constexpr unsigned kSharedSites = 32;
constexpr unsigned kLooks = 16;  // at words, after which a fiber gives way whatever they are

struct Block;

enum class State { kRuns, kWaits, kEnded };

struct Thread {
  Fiber fiber;
  Block* block;
  unsigned index;
  State state;
  bool spun;              // gave way since it waits for another
  const void* looked[4];  // the words that it looked at last
  unsigned looks;
};

struct Launch {
  const Kernel& kernel;
  const void* parameters;
  Context& context;
  Random& random;
  CUresult failed;
  char message[400];
};

struct Block {
  Launch* launch;
  unsigned index, size, blocks;
  std::unique_ptr<Thread*[]> threads;
  unsigned waiting = 0, ended = 0;
  bool vote = false, result = false;
  const char* what = nullptr;  // the barrier that threads wait at
  int line = 0;
  unsigned met = 0;  // barriers
  // TSan's: the start, barriers in turn (a quick thread may be at the next one), and the end.
  char start = 0, meeting[2] = {}, end = 0;
  struct {
    const void* site;
    char* at;
  } sites[kSharedSites];
  unsigned site_count = 0;
  std::size_t shared_used = 0;
  alignas(64) char shared[kSharedBytes];
};

Kernel* kernels = nullptr;
thread_local Thread* me = nullptr;
std::atomic<unsigned> resident[64];  // threads, of each device

// Fibers that the stream's thread keeps.
struct Pool {
  Thread** idle = nullptr;
  unsigned count = 0, room = 0;
  ~Pool() {
    while (count > 0) delete idle[--count];
    std::free(idle);
  }
  Thread* take() { return count > 0 ? idle[--count] : new Thread(); }
  void give(Thread* thread) {
    if (count == room) {
      room = room ? 2 * room : 64;
      idle = static_cast<Thread**>(std::realloc(idle, room * sizeof(Thread*)));
      if (!idle) std::abort();
    }
    idle[count++] = thread;
  }
};
thread_local Pool pool;

bool reserve(int device, unsigned threads) {
  const unsigned most = settings().multiprocessors * kThreadsOfMultiprocessor;
  unsigned now = resident[device].load(std::memory_order_relaxed);
  do {
    if (now + threads > most) return false;
  } while (!resident[device].compare_exchange_weak(now, now + threads, std::memory_order_relaxed));
  return true;
}

void give_way(bool spun) {
  me->spun = spun;
  Fiber::leave(false);
}

// An explorer's draw, where threads and ranks meet: one time of `rarity` the whole launch stands
// still, so that others see it half done, and one time of `rarity` this thread alone does.
void explore(unsigned rarity) {
  if (!settings().exploring) return;
  Random& random = me->block->launch->random;
  if (random.below(rarity) == 0) {
    const timespec pause{0, static_cast<long>(random.below(400'000))};
    nanosleep(&pause, nullptr);
  }
  if (random.below(rarity) == 0) give_way(false);
}

int describe(char* text, std::size_t bytes) {
  return std::snprintf(text, bytes,
                       "kernel `%s`, block %u, thread %u: ", me->block->launch->kernel.name,
                       me->block->index, me->index);
}

// Ends the kernel that calls, in every thread of it.
[[noreturn]] [[gnu::format(printf, 2, 3)]] void fail(CUresult code, const char* format, ...) {
  Launch& launch = *me->block->launch;
  launch.failed = code;
  const int named = describe(launch.message, sizeof launch.message);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(launch.message + named, sizeof launch.message - static_cast<std::size_t>(named),
                 format, arguments);
  va_end(arguments);
  Fiber::leave(false);
  std::abort();
}

void run_thread(void* argument) {
  Block& block = *static_cast<Thread*>(argument)->block;
  orders_after(&block.start);
  block.launch->kernel.body(block.launch->parameters);
  if (block.waiting > 0)
    fail(CUDA_ERROR_LAUNCH_FAILED,
         "ended, while %u of %u threads wait at %s() (line %d) that it never came to",
         block.waiting, block.size, block.what, block.line);
  me->state = State::kEnded;
  me->spun = false;
  ++block.ended;
  orders_before(&block.end);
  Fiber::leave(true);
}

Block* start(Launch& launch, unsigned index, unsigned blocks, unsigned size) {
  Block* const block = new Block;
  block->launch = &launch;
  block->index = index;
  block->size = size;
  block->blocks = blocks;
  block->threads = std::make_unique<Thread*[]>(size);
  std::memset(block->shared, 0xff, sizeof block->shared);
  orders_before(&block->start);
  for (unsigned i = 0; i < size; ++i) {
    Thread* const thread = pool.take();
    thread->block = block;
    thread->index = i;
    thread->state = State::kRuns;
    thread->looks = 0;
    std::fill(std::begin(thread->looked), std::end(thread->looked), nullptr);
    thread->fiber.prepare(run_thread, thread);
    block->threads[i] = thread;
  }
  return block;
}

void finish(Block* block) {
  for (unsigned i = 0; i < block->size; ++i) {
    if (block->threads[i]->state != State::kEnded) block->threads[i]->fiber.abandon(&block->end);
    pool.give(block->threads[i]);
  }
  orders_after(&block->end);
  resident[block->launch->context.device].fetch_sub(block->size, std::memory_order_relaxed);
  delete block;
}

// Nothing moves until another stream, process or the host does something.
void idle(unsigned rounds) {
  if (rounds < 3) {
    sched_yield();
    return;
  }
  const timespec pause{0, std::min(10'000l << std::min(rounds - 3, 5u), 200'000l)};
  nanosleep(&pause, nullptr);
}

// Every thread that can go on, once, in a drawn order. Whether any did more than look.
bool run_round(Block* const* blocks, unsigned count, Launch& launch, Thread** order) {
  unsigned ready = 0;
  for (unsigned b = 0; b < count; ++b)
    for (unsigned i = 0; i < blocks[b]->size; ++i)
      if (blocks[b]->threads[i]->state == State::kRuns) order[ready++] = blocks[b]->threads[i];
  bool moved = false;
  for (; ready > 0 && launch.failed == CUDA_SUCCESS; --ready) {
    std::swap(order[launch.random.below(ready)], order[ready - 1]);
    me = order[ready - 1];
    me->fiber.resume();
    moved |= !me->spun;
  }
  me = nullptr;
  return moved;
}

}  // namespace

const Kernel* find_kernel(const char* name) {
  for (const Kernel* kernel = kernels; kernel; kernel = kernel->next)
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

void run_kernel(const Kernel& kernel, const void* parameters, unsigned blocks, unsigned threads,
                Context& context, Random& random) {
  Launch launch{kernel, parameters, context, random, CUDA_SUCCESS, {}};
  const unsigned fit = settings().multiprocessors *
                       std::min(kThreadsOfMultiprocessor / threads, kBlocksOfMultiprocessor);
  const unsigned most = std::min(blocks, fit);
  std::vector<Block*> running(most);
  std::vector<Thread*> order(std::size_t{most} * threads);
  unsigned count = 0, next = 0, still = 0;
  while (next < blocks || count > 0) {
    while (next < blocks && count < most && reserve(context.device, threads))
      running[count++] = start(launch, next++, blocks, threads);
    const bool moved = run_round(running.data(), count, launch, order.data());
    if (launch.failed != CUDA_SUCCESS || context.error() != CUDA_SUCCESS) break;
    for (unsigned b = count; b-- > 0;)
      if (running[b]->ended == running[b]->size) {
        finish(running[b]);
        running[b] = running[--count];
      }
    if (moved)
      still = 0;
    else
      idle(still++);
  }
  while (count > 0) finish(running[--count]);
  if (launch.failed != CUDA_SUCCESS) context.fail(launch.failed, launch.message);
}

bool running_kernel(char* text, std::size_t bytes) {
  if (!me) return false;
  describe(text, bytes);
  return true;
}

}  // namespace standin

namespace pycollective::cuda {

using standin::me;

namespace emulated {

bool add(Kernel& kernel) {
  kernel.next = standin::kernels;
  standin::kernels = &kernel;
  return true;
}

void* visible(const volatile void* address) {
  if (!address) return nullptr;
  const auto number = reinterpret_cast<std::uint64_t>(address);
  const standin::Place place = standin::find_place(number);
  const standin::Context& context = me->block->launch->context;
  if (place.kind != standin::Kind::kDevice && place.kind != standin::Kind::kMapped)
    standin::fail(CUDA_ERROR_ILLEGAL_ADDRESS, "0x%llx is %s",
                  static_cast<unsigned long long>(number),
                  place.kind == standin::Kind::kForbidden ? "no allocation's, or a freed one's"
                                                          : "the host's, not a device's pointer");
  if (place.kind == standin::Kind::kDevice && place.context != &context &&
      !context.reaches(place.context->device))
    standin::fail(CUDA_ERROR_ILLEGAL_ADDRESS, "0x%llx is of device %d, to which it has no access",
                  static_cast<unsigned long long>(number), place.context->device);
  return place.seen;
}

void* shared(const void* site, std::size_t bytes, std::size_t alignment) {
  standin::Block& block = *me->block;
  for (unsigned i = 0; i < block.site_count; ++i)
    if (block.sites[i].site == site) return block.sites[i].at;
  const std::size_t at = (block.shared_used + alignment - 1) / alignment * alignment;
  if (block.site_count == standin::kSharedSites || at + bytes > standin::kSharedBytes)
    standin::fail(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "more shared memory than there is");
  block.shared_used = at + bytes;
  block.sites[block.site_count++] = {site, block.shared + at};
  return block.shared + at;
}

void looks_at(const void* word) {
  const bool again =
      std::find(std::begin(me->looked), std::end(me->looked), word) != std::end(me->looked) ||
      me->looks >= standin::kLooks;
  if (again) {
    me->looks = 0;
    standin::give_way(true);
    return;
  }
  me->looked[me->looks++ % 4] = word;
  standin::explore(16);
}

void has_published() {
  me->looks = 0;
  std::fill(std::begin(me->looked), std::end(me->looked), nullptr);
  standin::explore(4);
}

bool meet(bool flag, const char* what, int line) {
  standin::Block& block = *me->block;
  if (block.ended > 0)
    standin::fail(CUDA_ERROR_LAUNCH_FAILED,
                  "waits at %s() (line %d), and %u of %u threads have ended without it", what, line,
                  block.ended, block.size);
  if (block.waiting > 0 && (line != block.line || what != block.what))
    standin::fail(CUDA_ERROR_LAUNCH_FAILED,
                  "came to %s() (line %d), while %u of %u threads wait at %s() (line %d)", what,
                  line, block.waiting, block.size, block.what, block.line);
  block.what = what;
  block.line = line;
  block.vote |= flag;
  char* const token = &block.meeting[block.met % 2];
  standin::orders_before(token);
  me->looks = 0;
  std::fill(std::begin(me->looked), std::end(me->looked), nullptr);
  if (++block.waiting < block.size) {
    me->state = standin::State::kWaits;
  } else {
    block.result = block.vote;
    block.vote = false;
    block.waiting = 0;
    ++block.met;
    for (unsigned i = 0; i < block.size; ++i) block.threads[i]->state = standin::State::kRuns;
  }
  standin::give_way(false);
  standin::orders_after(token);
  return block.result;
}

}  // namespace emulated

unsigned thread() { return me->index; }
unsigned threads() { return me->block->size; }
unsigned block() { return me->block->index; }
unsigned blocks() { return me->block->blocks; }

std::uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void pause() { standin::give_way(true); }

}  // namespace pycollective::cuda
