// Which class carries an operation on host arrays out.
#pragma once

#include <stdexcept>
#include <utility>
#include <variant>

#include "engine/operations/all_to_all_v.h"
#include "engine/operations/dealt_blocks.h"
#include "engine/operations/direct_operation.h"
#include "engine/operations/internode_pair.h"
#include "engine/operations/point_to_point.h"
#include "engine/operations/scheduled.h"

namespace pycollective {

// Storage for one operation on host arrays, or one of `Others`, so that a call allocates nothing.
template <class... Others>
class HostOperationOr {
 public:
  // Chooses the class by what all ranks agree on, never by the rank.
  Operation& make(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (is_pair(request.kind)) return make_pair(group, task, sequence);
    if (request.all_to_all_v) return hold<AllToAllV>(group, task, sequence);
    if (task.program) return hold<Scheduled>(group, task, sequence);
    if (group.messenger() != nullptr)  // what follows would reduce over this host alone
      throw std::logic_error("an operation between hosts has no program");
    if (request.nodes) return hold<DealtBlocks>(group, task, sequence);
    return hold<DirectOperation>().make(group, task, sequence);
  }

 private:
  Operation& make_pair(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (request.root == kAnySource) return hold<ReceiveAny>(group, task, sequence);
    if (!group.member_of(request.root)) return hold<InternodePair>(group, task, sequence);
    if (request.kind == OpKind::kSend) return hold<Send>(group, task, sequence);
    return hold<Receive>(group, task, sequence);
  }

 protected:
  template <class Kind, class... Arguments>
  Kind& hold(Arguments&&... arguments) {
    return made_.template emplace<Kind>(std::forward<Arguments>(arguments)...);
  }

  std::variant<std::monostate, DirectOperation, Scheduled, Send, Receive, InternodePair, ReceiveAny,
               AllToAllV, DealtBlocks, Others...>
      made_;
};

using HostOperation = HostOperationOr<>;

}  // namespace pycollective
