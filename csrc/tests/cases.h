// Cases of a test that runs on a GPU: each is named before it begins, and ends the process by its
// name when it crashes or takes too long, so that a machine that is seen once says where.
#pragma once

#include <execinfo.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace pycollective::testing {

class Cases {
 public:
  Cases() {
    void* first[1];
    backtrace(first, 1);  // it allocates in its first call, which a handler may not
    for (const int signal : {
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
             SIGSEGV, SIGBUS, SIGABRT,
#endif
             SIGALRM})
      std::signal(signal, ended);
  }
  ~Cases() { alarm(0); }

  template <class Body>
  void run(const char* name, const Body& body) {
    name_ = name;
    std::printf("%s\n", name);
    std::fflush(stdout);
    alarm(kLongestCase);
    body();
    alarm(0);
  }
  static void skip(const char* name, const char* why) {
    std::printf("%s: skipped, %s\n", name, why);
    std::fflush(stdout);
  }

 private:
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  static constexpr unsigned kLongestCase = 500;  // seconds
#else
  static constexpr unsigned kLongestCase = 55;
#endif

  static void say(const char* text) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
  }
  static void ended(int signal) {
    std::signal(signal, SIG_DFL);
    say(signal == SIGALRM ? "not done in time: " : "ended by a signal: ");
    say(name_);
    say("\n");
    void* frames[32];
    backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
    raise(signal);
  }

  static inline const char* volatile name_ = "before the first case";
};

}  // namespace pycollective::testing
