#include "fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "sanitizers.h"

#if !defined(__x86_64__)
#define STANDIN_UCONTEXT
#endif
#if defined(STANDIN_UCONTEXT)
#include <ucontext.h>
#endif

namespace standin {
namespace {

constexpr std::size_t kStack = std::size_t{128} << 10;
constexpr std::size_t kGuard = 4096;

// The thread that resumes, and the fiber that runs on it.
thread_local Fiber* running = nullptr;
thread_local void* resumer = nullptr;  // its stack pointer
#if defined(__SANITIZE_ADDRESS__)
thread_local const void* resumer_stack = nullptr;
thread_local std::size_t resumer_stack_bytes = 0;
#endif
#if defined(STANDIN_TSAN)
thread_local void* resumer_thread_sanitizer = nullptr;
#endif

}  // namespace

#if !defined(STANDIN_UCONTEXT)
// Keeps what the System V ABI says a call keeps, and goes on where the other stack left off.
extern "C" void standin_switch(void** from, void* to);
asm(R"(
.text
.p2align 4
.globl standin_switch
.hidden standin_switch
.type standin_switch, @function
standin_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size standin_switch, .-standin_switch
)");

static void* fresh(char* top, void (*enter)()) {
  auto** at = reinterpret_cast<void**>(top);
  *--at = nullptr;  // where enter() would return to; also what aligns its frame
  *--at = reinterpret_cast<void*>(enter);
  for (int kept = 0; kept < 6; ++kept) *--at = nullptr;
  return at;
}
#else
static void standin_switch(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

static void* fresh(char* top, void (*enter)()) {
  auto* const context = reinterpret_cast<ucontext_t*>(top - kStack);  // the stack's other end
  getcontext(context);
  context->uc_stack.ss_sp = context + 1;
  context->uc_stack.ss_size = kStack - sizeof *context;
  context->uc_link = nullptr;
  makecontext(context, enter, 0);
  return context;
}
#endif

Fiber::Fiber() {
  void* const at = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (at == MAP_FAILED) std::abort();
  mprotect(at, kGuard, PROT_NONE);
  stack_ = static_cast<char*>(at) + kGuard;
#if defined(STANDIN_TSAN)
  thread_sanitizer_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(STANDIN_TSAN)
  __tsan_destroy_fiber(thread_sanitizer_);
#endif
  unpoison(stack_, kStack);
  munmap(stack_ - kGuard, kGuard + kStack);
}

void Fiber::prepare(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  position_ = fresh(stack_ + kStack, &Fiber::enter);
}

void Fiber::enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &resumer_stack, &resumer_stack_bytes);
#endif
  running->entry_(running->argument_);
  std::abort();
}

void Fiber::resume() {
  running = this;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stack_, kStack);
#endif
#if defined(STANDIN_TSAN)
  resumer_thread_sanitizer = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_sanitizer_, __tsan_switch_to_fiber_no_sync);
#endif
  standin_switch(&resumer, position_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  running = nullptr;
}

void Fiber::leave([[maybe_unused]] bool for_good) {
  Fiber* const self = running;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, resumer_stack, resumer_stack_bytes);
#endif
#if defined(STANDIN_TSAN)
  __tsan_switch_to_fiber(resumer_thread_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  standin_switch(&self->position_, resumer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, &resumer_stack, &resumer_stack_bytes);
#endif
}

void Fiber::abandon([[maybe_unused]] void* token) {
  unpoison(stack_, kStack);
#if defined(STANDIN_TSAN)
  void* const self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(thread_sanitizer_, __tsan_switch_to_fiber_no_sync);
  orders_before(token);
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
  __tsan_destroy_fiber(thread_sanitizer_);  // its calls were never returned from
  thread_sanitizer_ = __tsan_create_fiber(0);
#endif
}

}  // namespace standin
