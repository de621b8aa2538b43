// Starts the library's own threads.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace pycollective {

// Starts a thread of this name that runs `act`. It takes no signals: those are for the host
// program's own threads. Throws std::system_error if the system grants no thread.
template <class Act>
std::thread start_thread(const char* name, Act act) {
  struct NoSignals {
    NoSignals() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } const inherited;
  return std::thread([name, act = std::move(act)] {
    pthread_setname_np(pthread_self(), name);
    act();
  });
}

}  // namespace pycollective
