// A request as the engine carries it out: with what its caller left open filled in, and with the
// engine's own state of the call.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/api.h"

namespace pycollective {

class DeviceGroup;  // engine/gpu/device_group.h
class LaunchTurn;   // engine/gpu/launch_order.h
namespace cuda {
class Staging;  // cuda/staging.h
}

struct Task {
  explicit Task(const Request& its_request)
      : request(&its_request),
        program(its_request.program),
        wire(its_request.wire),
        timeout(its_request.timeout) {}
  // The same for a copy of its request.
  Task with(const Request& copied) const {
    Task made = *this;
    made.request = &copied;
    return made;
  }

  const Request* request;                  // outlives this
  std::shared_ptr<const Program> program;  // none: the direct paths
  Wire wire;
  double timeout;                // seconds; 0: the communicator's
  bool asynchronous = false;     // the caller does not wait
  std::uint64_t recv_order = 0;  // of receives, where some are from any rank; else 0

  // Of arrays on a GPU, one of these two: by way of the host, or by GPU kernels.
  std::shared_ptr<cuda::Staging> staging;
  std::shared_ptr<DeviceGroup> device;
  bool captured = false;                    // its stream was being captured at the call
  std::shared_ptr<LaunchTurn> launch_turn;  // when it may be launched, unless it was captured
};

// Refuses a request that cannot be right, before anything moves.
// Throws CollectiveFailure (kConfiguration).
void validate(const Request& request, int rank, int size);

}  // namespace pycollective
