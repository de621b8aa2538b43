#include "engine/internode/deferred_close.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "per_process.h"

namespace pycollective {
namespace {

struct DeferredCloses {
  std::mutex mutex;
  std::vector<std::shared_ptr<Messenger>> all;
};

// At the end of the process there may be no MPI any more: they are never destroyed.
PerProcess<DeferredCloses> deferred;

}  // namespace

void defer_close(std::shared_ptr<Messenger> messenger) {
  const std::lock_guard lock(deferred->mutex);
  deferred->all.push_back(std::move(messenger));
}

void finish_deferred_closes() {
  const std::lock_guard lock(deferred->mutex);
  auto& all = deferred->all;
  all.erase(
      std::remove_if(all.begin(), all.end(), [](const auto& each) { return each->has_ended(); }),
      all.end());
}

void give_up_deferred_closes() {
  const std::lock_guard lock(deferred->mutex);
  for (const auto& each : deferred->all) each->stop_listening();
}

}  // namespace pycollective
