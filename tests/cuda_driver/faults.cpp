#include "faults.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "launch.h"
#include "memory.h"

namespace standin {
namespace {

// ASan says more of a fault, and wants the signal for itself.
constexpr bool kAddressSanitizer =
#if defined(__SANITIZE_ADDRESS__)
    true;
#else
    false;
#endif
constexpr std::size_t kStack = std::size_t{64} << 10;
struct sigaction before[2];

void name_fault(int signal, siginfo_t* what, void*) {
  char kernel[200], text[400];
  if (running_kernel(kernel, sizeof kernel)) {
    const int length = std::snprintf(
        text, sizeof text, "stand-in for the CUDA driver: %sfault at %p (device memory + %#llx)\n",
        kernel, what->si_addr, static_cast<unsigned long long>(emulation_offset()));
    [[maybe_unused]] const ssize_t written =
        write(STDERR_FILENO, text, static_cast<std::size_t>(length));
  }
  sigaction(signal, &before[signal == SIGBUS], nullptr);  // and faults again
}

}  // namespace

void name_faults() {
  if (kAddressSanitizer) return;
  struct sigaction action = {};
  action.sa_sigaction = name_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before[0]);
  sigaction(SIGBUS, &action, &before[1]);
}

void prepare_fault_stack() {
  if (kAddressSanitizer) return;
  struct Stack {
    void* at = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ~Stack() {
      const stack_t none = {nullptr, SS_DISABLE, 0};
      sigaltstack(&none, nullptr);
      munmap(at, kStack);
    }
  };
  thread_local const Stack stack;
  const stack_t own = {stack.at, 0, kStack};
  if (stack.at != MAP_FAILED) sigaltstack(&own, nullptr);
}

}  // namespace standin
