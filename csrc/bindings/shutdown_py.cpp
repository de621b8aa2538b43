#include "bindings/objects.h"

#include <algorithm>
#include <vector>

#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "engine/internode/messenger.h"
#include "per_process.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// In the order in which they were made. Under the interpreter's lock.
template <class Kept>
class Living {
 public:
  void add(const std::shared_ptr<Kept>& made) {
    all_.erase(
        std::remove_if(all_.begin(), all_.end(), [](const auto& it) { return it.expired(); }),
        all_.end());
    all_.push_back(made);
  }
  std::vector<std::shared_ptr<Kept>> shares() const {
    std::vector<std::shared_ptr<Kept>> found;
    for (const auto& each : all_)
      if (std::shared_ptr<Kept> share = each.lock()) found.push_back(std::move(share));
    return found;
  }

 private:
  std::vector<std::weak_ptr<Kept>> all_;
};

// What this process must end. A fork has its own: its parent ends the parent's.
struct Ending {
  Living<Communicator> communicators;
  Living<Progress> progresses;
};
PerProcess<Ending> ending;

void abort_all(const std::string& reason) {
  std::vector<std::shared_ptr<Communicator>> open = ending->communicators.shares();
  const GilReleased unlocked;  // the last share of a communicator joins the progress thread
  for (const auto& each : open)
    if (!each->closed()) each->abort(reason);
  open.clear();
}

// Aborts what is busy, then closes all, the newest first. Whether anything was busy.
bool close_all() {
  std::vector<std::shared_ptr<Communicator>> open = ending->communicators.shares();
  std::reverse(open.begin(), open.end());
  bool any_busy = false;
  bool interrupted = false;
  {
    const GilReleased unlocked;
    for (const auto& each : open) {
      if (each->closed()) continue;  // by another thread perhaps, which may not have left yet
      if (!each->busy()) continue;
      any_busy = true;
      each->abort("the process exits with operations pending");
    }
    for (const auto& each : open) {
      // Another thread may still begin an operation, which no peer will come to.
      const InterruptHook hook = [&] {
        if (each->busy()) each->abort("the process exits with operations pending");
        return !interrupted && (interrupted = python_interrupts()());
      };
      try {
        each->close(hook);
      } catch (const CollectiveFailure& error) {
        // Interrupted, it is closed all the same, and Python's error is set. Otherwise work on a
        // GPU had ended badly, of which nobody else is told.
        if (!interrupted) std::fprintf(stderr, "pycollective: at exit: %s\n", error.what());
      }
    }
    give_up_deferred_closes();
  }
  for (const auto& each : open) each->forget_sources();
  {
    const GilReleased unlocked;  // the last share of a communicator joins the progress thread
    open.clear();
  }
  if (interrupted) throw py::error_already_set();
  return any_busy;
}

void stop_progress() {
  const std::vector<std::shared_ptr<Progress>> all = ending->progresses.shares();
  const GilReleased unlocked;
  for (const auto& each : all) each->stop();
}

}  // namespace

void remember(const std::shared_ptr<Communicator>& communicator) {
  ending->communicators.add(communicator);
}

void remember(const std::shared_ptr<Progress>& progress) { ending->progresses.add(progress); }

void bind_shutdown(py::module_& module) {
  module.def("abort_all", &abort_all, py::arg("reason"),
             "Abort every communicator of this process that is open, those included whose Python "
             "object is gone.");
  module.def("close_all", &close_all,
             "Close every communicator of this process, those included whose Python object is "
             "gone; abort first what has operations pending.\n\n"
             "Returns whether any operation was pending. KeyboardInterrupt: all are closed.");
  module.def("stop_progress", &stop_progress,
             "End the progress thread for good, and wait until it has ended.");
}

}  // namespace pycollective
