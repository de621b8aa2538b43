// The direct paths, on one host: which class carries an operation out, chosen by what all ranks
// agree on.
#pragma once

#include <variant>

#include "engine/operations/one_shot.h"
#include "engine/operations/single_copy.h"
#include "engine/operations/two_shot.h"

namespace pycollective {

class DirectOperation {
 public:
  Operation& make(Group& group, const Task& task, std::uint64_t sequence) {
    const Request& request = *task.request;
    if (SingleCopy::fits(group, request)) return made_.emplace<SingleCopy>(group, task, sequence);
    if (OneShot::fits(group, request)) return made_.emplace<OneShot>(group, task, sequence);
    return made_.emplace<TwoShot>(group, task, sequence);
  }

 private:
  std::variant<std::monostate, OneShot, TwoShot, SingleCopy> made_;
};

}  // namespace pycollective
