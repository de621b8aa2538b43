// The stand-in as a program sees it: opened by name, its functions asked for by name and version.
// And processes: each test is one of its own, so that it begins with a fresh driver.
#pragma once

#include <dlfcn.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "exports.h"
#include "test_kernels.h"
#include "tests/check.h"

namespace standin::testing {

#define EXPECT(code, ...)                                                                     \
  do {                                                                                        \
    const CUresult got_ = (__VA_ARGS__);                                                      \
    if (got_ != (code)) {                                                                     \
      std::fprintf(stderr, "%s:%d: %s: %d, not %s\n", __FILE__, __LINE__, #__VA_ARGS__, got_, \
                   #code);                                                                    \
      std::abort();                                                                           \
    }                                                                                         \
  } while (false)
#define OK(...) EXPECT(CUDA_SUCCESS, __VA_ARGS__)

struct Driver {
#define MEMBER(base, since, exported) decltype(&::exported) base = nullptr;
  STANDIN_FUNCTIONS(MEMBER)
  STANDIN_OLDER_FUNCTIONS(MEMBER)
#undef MEMBER
};

inline Driver load() {
  const char* const path = std::getenv("PYCOLLECTIVE_CUDA_DRIVER");
  CHECK(path);
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) std::fprintf(stderr, "%s\n", dlerror());
  CHECK(library);
  const auto find =
      reinterpret_cast<decltype(&::cuGetProcAddress_v2)>(dlsym(library, "cuGetProcAddress_v2"));
  CHECK(find);
  Driver driver;
#define FETCH(base, since, exported)                                         \
  {                                                                          \
    void* function = nullptr;                                                \
    CUdriverProcAddressQueryResult status;                                   \
    OK(find(#base, &function, since, CU_GET_PROC_ADDRESS_DEFAULT, &status)); \
    CHECK(function && status == CU_GET_PROC_ADDRESS_SUCCESS);                \
    CHECK(dlsym(library, #exported)); /* the one found counts, too */        \
    driver.base = reinterpret_cast<decltype(driver.base)>(function);         \
  }
  STANDIN_FUNCTIONS(FETCH)
  STANDIN_OLDER_FUNCTIONS(FETCH)
#undef FETCH
  return driver;
}

inline const Driver& cu() {
  static const Driver driver = load();
  return driver;
}

// A process of this program that runs what is registered under the name, with a socket.
struct Process {
  pid_t pid = -1;
  int socket = -1;
  int errors = -1;  // its stderr

  explicit Process(const std::string& name,
                   const std::map<std::string, std::string>& environment = {}) {
    int pair[2], text[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0 && pipe(text) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      dup2(pair[1], 3);
      dup2(text[1], 2);
      close(text[0]);
      for (const auto& [key, value] : environment) setenv(key.c_str(), value.c_str(), 1);
      execl("/proc/self/exe", "test", name.c_str(), static_cast<char*>(nullptr));
      _exit(127);
    }
    close(pair[1]);
    close(text[1]);
    socket = pair[0];
    errors = text[0];
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    close(socket);
    close(errors);
  }

  template <class T>
  void send(const T& value) const {
    CHECK(write(socket, &value, sizeof value) == sizeof value);
  }
  template <class T>
  T receive() const {
    T value;
    CHECK(recv(socket, &value, sizeof value, MSG_WAITALL) == sizeof value);
    return value;
  }
  // What it wrote to stderr, and how it ended, as waitpid() has it.
  std::pair<std::string, int> end() const {
    std::string text;
    char part[4096];
    for (ssize_t got; (got = read(errors, part, sizeof part)) > 0;)
      text.append(part, static_cast<std::size_t>(got));
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return {text, status};
  }
};

// The other side of a Process.
template <class T>
void to_parent(const T& value) {
  CHECK(write(3, &value, sizeof value) == sizeof value);
}
template <class T>
T from_parent() {
  T value;
  CHECK(recv(3, &value, sizeof value, MSG_WAITALL) == sizeof value);
  return value;
}

struct Named {
  const char* name;
  void (*body)();
  bool test;  // not a part that a test starts
};
inline std::vector<Named>& all_named() {
  static std::vector<Named> all;
  return all;
}
#define NAMED(name, is_test)                                                              \
  static void name();                                                                     \
  static const bool name##_added = (all_named().push_back({#name, name, is_test}), true); \
  static void name()
#define TEST(name) NAMED(name, true)
#define PART(name) NAMED(name, false)  // of a test, in another process

inline bool ended_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
inline bool faulted(int status) {
  return WIFSIGNALED(status) && (WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS);
}

// Fails where the part does not end by itself, and says what it said.
inline std::string run_part(const std::string& name,
                            const std::map<std::string, std::string>& environment = {}) {
  const auto [text, status] = Process(name, environment).end();
  if (!ended_well(status))
    std::fprintf(stderr, "%s: status %d\n%s", name.c_str(), status, text.c_str());
  CHECK(ended_well(status));
  return text;
}

inline int run_all(int count, char** arguments) {
  if (count > 1) {
    alarm(120);
    for (const Named& one : all_named())
      if (std::strcmp(one.name, arguments[1]) == 0) {
        one.body();
        std::fflush(nullptr);
        _exit(0);  // streams may still spin, as those of a program that ends may
      }
    std::fprintf(stderr, "no test %s\n", arguments[1]);
    return 1;
  }
  int failed = 0;
  for (const Named& one : all_named()) {
    if (!one.test) continue;
    const auto begin = std::chrono::steady_clock::now();
    const auto [text, status] = Process(one.name).end();
    const bool well = ended_well(status);
    failed += !well;
    std::printf("%-44s %s %6.0f ms\n", one.name, well ? "ok    " : "FAILED",
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
                    .count());
    if (!well) std::printf("status %d\n%s\n", status, text.c_str());
    std::fflush(stdout);
  }
  return failed != 0;
}

}  // namespace standin::testing

// A fault shall end the process by its signal, also under the sanitizers, which look for these.
#define TEST_MAIN                                                                  \
  extern "C" [[gnu::visibility("default")]] const char* __asan_default_options() { \
    return "handle_segv=0:handle_sigbus=0";                                        \
  }                                                                                \
  extern "C" [[gnu::visibility("default")]] const char* __tsan_default_options() { \
    return "handle_segv=0:handle_sigbus=0:atexit_sleep_ms=0";                      \
  }                                                                                \
  int main(int count, char** arguments) { return standin::testing::run_all(count, arguments); }
