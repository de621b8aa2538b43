// Which class carries an operation on host arrays out.
#pragma once

#include <stdexcept>
#include <variant>

#include "engine/operations/all_to_all_v.h"
#include "engine/operations/dealt_blocks.h"
#include "engine/operations/direct_operation.h"
#include "engine/operations/internode_pair.h"
#include "engine/operations/point_to_point.h"
#include "engine/operations/scheduled.h"

namespace pycollective {

class HostOperation {
 public:
  // Chooses the class by what all ranks agree on, never by the rank.
  Operation& make(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (is_pair(request.kind)) return make_pair(group, task, sequence);
    if (request.all_to_all_v) return made_.emplace<AllToAllV>(group, task, sequence);
    if (task.program) return made_.emplace<Scheduled>(group, task, sequence);
    if (group.messenger() != nullptr)  // what follows would reduce over this host alone
      throw std::logic_error("an operation between hosts has no program");
    if (request.nodes) return made_.emplace<DealtBlocks>(group, task, sequence);
    return made_.emplace<DirectOperation>().make(group, task, sequence);
  }

 private:
  Operation& make_pair(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (request.root == kAnySource) return made_.emplace<ReceiveAny>(group, task, sequence);
    if (!group.member_of(request.root)) return made_.emplace<InternodePair>(group, task, sequence);
    if (request.kind == OpKind::kSend) return made_.emplace<Send>(group, task, sequence);
    return made_.emplace<Receive>(group, task, sequence);
  }

  std::variant<std::monostate, DirectOperation, Scheduled, Send, Receive, InternodePair, ReceiveAny,
               AllToAllV, DealtBlocks>
      made_;
};

}  // namespace pycollective
