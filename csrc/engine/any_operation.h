// Which class carries an operation out.
#pragma once

#include <variant>

#include "engine/gpu/on_device.h"
#include "engine/gpu/staged.h"
#include "engine/operations/host_operation.h"

namespace pycollective {

class AnyOperation : private HostOperationOr<Staged, OnDevice> {
 public:
  // Chooses the class by what all ranks agree on, never by the rank.
  Operation& make(Group& group, const Task& task, std::uint64_t sequence) {
    if (task.device) return hold<OnDevice>(group, task, sequence);
    if (task.staging) return hold<Staged>(group, task, sequence);
    return HostOperationOr::make(group, task, sequence);
  }
  // Destroys the operation; the group may go afterwards.
  void end() { made_.emplace<std::monostate>(); }
};

}  // namespace pycollective
