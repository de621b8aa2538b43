#include "engine/far/lingering.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace pycollective {
namespace {

// Never destroyed: at the end of the process there may be no MPI any more.
std::mutex& mutex = *new std::mutex;
auto& lingering = *new std::vector<std::shared_ptr<Messenger>>;

}  // namespace

void let_linger(std::shared_ptr<Messenger> messenger) {
  const std::lock_guard lock(mutex);
  lingering.push_back(std::move(messenger));
}

void look_after_lingering() {
  const std::lock_guard lock(mutex);
  lingering.erase(std::remove_if(lingering.begin(), lingering.end(),
                                 [](const auto& each) { return each->has_ended(); }),
                  lingering.end());
}

void stop_lingering() {
  const std::lock_guard lock(mutex);
  for (const auto& each : lingering) each->stop_listening();
}

}  // namespace pycollective
