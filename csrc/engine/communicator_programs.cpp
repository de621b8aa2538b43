// What a request leaves open: where its program comes from, and how its messages travel.
#include <utility>

#include "engine/communicator.h"
#include "engine/gpu/staged.h"
#include "engine/operations/scheduled.h"
#include "engine/plans/program.h"
#include "engine/plans/wire_trial.h"

namespace pycollective {

const std::shared_ptr<const Program>& Communicator::direct_paths() {
  static const std::shared_ptr<const Program> none = std::make_shared<const Program>();
  return none;
}

const Request& Communicator::with_program(const Request& request, std::optional<Request>& room,
                                          bool asynchronous) {
  const bool nowhere = request.location.device == Location::kAnyDevice;
  if (!request.location.on_host() && device_ && DeviceGroup::serves(request.kind))
    return for_device(request, room, asynchronous);
  const bool far = group_->messenger() != nullptr;
  if (far) group_->messenger()->poll();  // a failure elsewhere is then known
  std::shared_ptr<const Program> program = request.program;
  if (program == direct_paths()) {
    program = nullptr;
  } else if (!program && choices_.has_source() && !is_pair(request.kind) && !request.exchange) {
    program = choices_.find(request);
  }
  if (!far && program == request.program && (request.location.on_host() || nowhere)) return request;
  Request& made = room.emplace(request);
  made.program = std::move(program);
  if (far) decide_wire(made);
  // A group with little memory, one of hundreds, has always room for the direct paths.
  if (!far && made.program && !Scheduled::has_room(*group_, made)) made.program = nullptr;
  if (!made.location.on_host() && !nowhere) {
    try {
      made.staging = stage(made, rank(), size());
    } catch (const cuda::DriverError& error) {
      fail_call(made, error);
    }
  }
  return made;
}

const Request& Communicator::for_device(const Request& request, std::optional<Request>& room,
                                        bool asynchronous) {
  watch_device(false);  // what ended badly there is then known
  Request& made = room.emplace(request);
  if (made.program == direct_paths()) made.program = nullptr;
  if (!(made.timeout > 0)) made.timeout = timeout_.load();
  try {
    device_->prepare(made);
    if (made.captured && asynchronous)
      throw std::invalid_argument(
          "while its stream is captured a call cannot be asynchronous: it might be launched after "
          "the capture; leave async_op out, nothing is waited for");
  } catch (const cuda::DriverError& error) {
    fail_call(made, error);
  } catch (const std::exception& error) {
    throw CollectiveFailure({FailureKind::kConfiguration, rank(), request.kind, 0,
                             std::string(name_of(request.kind)) + ": " + error.what()});
  }
  made.device = device_;
  return made;
}

void Communicator::fail_call(const Request& request, const cuda::DriverError& error) {
  const Failure failure{FailureKind::kAborted, rank(), request.kind, 0,
                        "rank " + std::to_string(rank()) + " could not carry out " +
                            name_of(request.kind) + ": " + error.what()};
  fail(failure);
  if (device_) device_->abort();  // fail() does nothing where another thread has just closed
  throw CollectiveFailure(failure);
}

void Communicator::decide_wire(Request& request) {
  if (is_pair(request.kind) || request.exchange) return;
  if (request.wire == Wire::kDefault) request.wire = wire_.load(std::memory_order_relaxed);
  // Without a source there is no program for what a trial needs.
  if (request.wire != Wire::kAuto || !request.program || !choices_.has_source()) return;
  const WireTrials::NextCall next = wire_trials_.next(request, size());
  request.trial = next.trial;
  request.call_of_trial = next.call;
  if (!next.trial) return;
  // It is carried out before this request, and after all that were made before.
  if (const auto before = WireTrial::before(request)) submit(*before, nullptr);
}

void Communicator::require_channel_room(const Request& request) {
  if (!room_check_) return;
  std::vector<Outgoing*> first;
  const auto add = [&](Member peer) {
    Outgoing& channel = group_->messages().to(peer);
    if (!channel.has_room.load(std::memory_order_relaxed)) first.push_back(&channel);
  };
  if (!request.exchange) {
    if (const auto peer = group_->member_of(request.root)) add(*peer);
  } else {
    for (const Member each : group_->members())
      if (each != group_->me()) add(each);
  }
  if (first.empty()) return;
  room_check_(request.kind, first.size() * kChannelBuffer,
              static_cast<int>(group_->world().near.size()));
  for (Outgoing* each : first) each->has_room.store(true, std::memory_order_relaxed);
}

}  // namespace pycollective
