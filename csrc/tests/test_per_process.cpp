// What a process has one of: the same for its threads, another for its forks.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

#include "per_process.h"
#include "tests/check.h"

using namespace pycollective;

namespace {

struct Counted {
  std::mutex mutex;
  int count = 0;
};

// Whatever the parent was doing with its own.
void a_fork_has_one_of_its_own() {
  static PerProcess<Counted> counted;
  counted->mutex.lock();
  counted->count = 7;
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // for a lock that nobody will give back
    const std::lock_guard lock(counted->mutex);
    _exit(counted->count++ == 0 && counted->count == 1 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(counted->count == 7);
  counted->mutex.unlock();
}

void threads_share_one() {
  static PerProcess<Counted> fifty[50];
  for (PerProcess<Counted>& counted : fifty) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        const std::lock_guard lock(counted->mutex);
        ++counted->count;
      });
    for (std::thread& each : threads) each.join();
    CHECK(counted->count == 4);
  }
}

}  // namespace

int main() {
  a_fork_has_one_of_its_own();
  threads_share_one();
  std::puts("what a process has one of: passed");
  return 0;
}
