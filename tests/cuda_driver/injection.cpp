#include "injection.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "context.h"

namespace standin {
namespace {

struct Counted {
  std::atomic<long> calls{0};
  std::atomic<long> fails_at{0};  // the call of this number, from 1 on
  std::atomic<int> code{CUDA_SUCCESS};
};

constexpr const char* kNames[] = {
#define STANDIN_NAME(base, since, exported) #base,
    STANDIN_FUNCTIONS(STANDIN_NAME) STANDIN_OLDER_FUNCTIONS(STANDIN_NAME)
#undef STANDIN_NAME
};

bool ends_contexts(int code) {
  return code == CUDA_ERROR_ILLEGAL_ADDRESS || code == CUDA_ERROR_LAUNCH_FAILED;
}

Counted* find(Counted* all, const char* name, std::size_t length) {
  for (std::size_t row = 0; row < kRows; ++row)
    if (std::strlen(kNames[row]) == length && std::strncmp(kNames[row], name, length) == 0)
      return &all[row];
  return nullptr;
}

void plant(Counted& one, long n, int code) {
  one.code = code;
  one.fails_at = n > 0 ? one.calls + n : 0;
}

// PYCOLLECTIVE_STANDIN_FAIL=<function>:<n>[:<code>]; the code is CUDA_ERROR_UNKNOWN otherwise.
void read_environment(Counted* all) {
  const char* const text = std::getenv("PYCOLLECTIVE_STANDIN_FAIL");
  if (!text || !*text) return;
  const char* const colon = std::strchr(text, ':');
  Counted* const one = colon ? find(all, text, static_cast<std::size_t>(colon - text)) : nullptr;
  if (!one) {
    std::fprintf(stderr, "stand-in for the CUDA driver: PYCOLLECTIVE_STANDIN_FAIL=%s\n", text);
    std::abort();
  }
  char* end = nullptr;
  const long n = std::strtol(colon + 1, &end, 10);
  plant(*one, n, *end == ':' ? std::atoi(end + 1) : CUDA_ERROR_UNKNOWN);
}

Counted* counted() {
  static Counted* const all = [] {
    auto* const made = new Counted[kRows];
    read_environment(made);
    return made;
  }();
  return all;
}

std::atomic<int> ended{CUDA_SUCCESS};
std::atomic<int> locked{0};

}  // namespace

CUresult planted(Row row) {
  while (locked != 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  Counted& one = counted()[row];
  const long n = ++one.calls;
  const long fails_at = one.fails_at;
  const auto code = static_cast<CUresult>(one.code.load());
  if (n == fails_at || (fails_at > 0 && n > fails_at && code == CUDA_ERROR_NOT_READY)) {
    if (ends_contexts(code)) {
      fail_contexts(code, "an error that a test has planted");
      ended = code;
    }
    return code;
  }
  // What the functions themselves do not say: a context that has failed cannot be used.
  return row == kRow_cuCtxPushCurrent ? static_cast<CUresult>(ended.load()) : CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

int standinFail(const char* name, int n, int code) {
  Counted* const one = find(counted(), name, std::strlen(name));
  if (one) plant(*one, n, code);
  return one ? 0 : -1;
}

void standinLock(int to) { locked = to; }

long standinCalls(const char* name) {
  Counted* const one = find(counted(), name, std::strlen(name));
  return one ? one->calls.load() : -1;
}
