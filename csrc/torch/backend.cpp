#include "torch/backend.h"

#include <torch/csrc/utils/pythoncapi_compat.h>

#include <optional>
#include <utility>

#include "bindings/gil.h"
#include "torch/errors.h"
#include "torch/work.h"

namespace pycollective::shim {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds));
}

// Copies no request where there is nothing to keep.
template <class Act>
void with_keep(const Request& request, const std::shared_ptr<const void>& keep, const Act& act) {
  if (!keep) return act(request);
  Request copy = request;
  copy.keep = keep;
  act(copy);
}

}  // namespace

Backend::Backend(std::shared_ptr<Collectives> collectives,
                 std::shared_ptr<CompletionThreads> threads, pybind11::object owner)
    : c10d::Backend(collectives->rank(), collectives->size()),
      collectives_(std::move(collectives)),
      threads_(std::move(threads)),
      owner_(std::move(owner)) {
  init();
}

Backend::~Backend() {
  // Once the interpreter is ending nothing of Python may be touched; the process is about to end.
  if (!Py_IsInitialized() || Py_IsFinalizing()) {
    owner_.release();
    return;
  }
  const GilHeld gil;
  owner_ = {};
}

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), milliseconds(collectives_->timeout()));
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "the timeout must be positive, not ", timeout.count(),
                    " ms");
  collectives_->set_timeout(std::chrono::duration<double>(timeout).count());
}

c10d::ErrorType Backend::getError() {
  const std::shared_ptr<const Failure> failure = collectives_->failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  return failure->kind == FailureKind::kTimeout ? c10d::ErrorType::TIMEOUT
                                                : c10d::ErrorType::COMM_ERROR;
}

void Backend::abort() { collectives_->abort("the process group was aborted"); }

void Backend::shutdown() {
  {
    const GilHeld gil;
    owner_.attr("close")();  // the communicator's own: Ctrl-C ends it
  }
  std::optional<GilReleased> unlocked;  // which the callbacks may need
  if (PyGILState_Check()) unlocked.emplace();
  threads_->close(milliseconds(collectives_->timeout()));
}

void Backend::carry_out(Transfer& transfer) {
  const std::shared_ptr<const void> keep = transfer.keep(*collectives_, threads_);
  typed([&](const InterruptHook& interrupted) {
    for (const Request& request : transfer.requests())
      with_keep(request, keep, [&](const Request& each) { collectives_->run(each, interrupted); });
  });
  transfer.copy_back();
}

c10::intrusive_ptr<c10d::Work> Backend::issue(c10d::OpType type, Transfer transfer, bool async) {
  const std::uint64_t sequence = ++sequence_;
  if (!async) {
    const auto profile = transfer.profile();
    carry_out(transfer);
    return c10::make_intrusive<Work>(rank_, type, sequence, Flight::ended(std::move(transfer)),
                                     std::vector<std::shared_ptr<pycollective::Work>>());
  }
  const std::shared_ptr<Flight> flight = Flight::start(std::move(transfer), threads_);
  std::vector<std::shared_ptr<pycollective::Work>> cores;
  cores.reserve(flight->transfer().requests().size());
  const std::shared_ptr<const void> keep = flight->transfer().keep(*collectives_, threads_);
  typed([&](const InterruptHook&) {
    for (const Request& request : flight->transfer().requests())
      with_keep(request, keep, [&](const Request& each) {
        cores.push_back(collectives_->submit(each, flight->on_done()));
      });
  });
  return c10::make_intrusive<Work>(rank_, type, sequence, flight, std::move(cores));
}

}  // namespace pycollective::shim
