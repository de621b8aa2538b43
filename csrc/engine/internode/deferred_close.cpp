#include "engine/internode/deferred_close.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "per_process.h"

namespace pycollective {
namespace {

struct Lingering {
  std::mutex mutex;
  std::vector<std::shared_ptr<Messenger>> all;
};

// At the end of the process there may be no MPI any more: they are never destroyed.
PerProcess<Lingering> lingering;

}  // namespace

void let_linger(std::shared_ptr<Messenger> messenger) {
  const std::lock_guard lock(lingering->mutex);
  lingering->all.push_back(std::move(messenger));
}

void look_after_lingering() {
  const std::lock_guard lock(lingering->mutex);
  auto& all = lingering->all;
  all.erase(
      std::remove_if(all.begin(), all.end(), [](const auto& each) { return each->has_ended(); }),
      all.end());
}

void stop_lingering() {
  const std::lock_guard lock(lingering->mutex);
  for (const auto& each : lingering->all) each->stop_listening();
}

}  // namespace pycollective
