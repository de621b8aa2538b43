// Which class carries an operation out.
#pragma once

#include <variant>

#include "engine/gpu/on_device.h"
#include "engine/gpu/staged.h"
#include "engine/operations/host_operation.h"

namespace pycollective {

// Storage for one operation of any kind, so that a call allocates nothing.
class AnyOperation {
 public:
  // Chooses the class by what all ranks agree on, never by the rank.
  Operation& make(Group& group, const Task& task, std::uint64_t sequence) {
    if (task.device) return made_.emplace<OnDevice>(group, task, sequence);
    if (task.staging) return made_.emplace<Staged>(group, task, sequence);
    return made_.emplace<HostOperation>().make(group, task, sequence);
  }
  // Destroys the operation; the group may go afterwards.
  void end() { made_.emplace<std::monostate>(); }

 private:
  std::variant<std::monostate, HostOperation, Staged, OnDevice> made_;
};

}  // namespace pycollective
