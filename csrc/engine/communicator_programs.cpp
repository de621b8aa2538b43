// Where a request that leaves the algorithm open gets its program from.
#include <utility>

#include "engine/communicator.h"
#include "engine/program.h"
#include "engine/scheduled.h"

namespace pycollective {

const std::shared_ptr<const Program>& Communicator::direct_paths() {
  static const std::shared_ptr<const Program> none = std::make_shared<const Program>();
  return none;
}

const Request& Communicator::with_program(const Request& request, Request& room) {
  const bool far = group_->messenger() != nullptr;
  if (far) group_->messenger()->poll();  // a failure elsewhere is then known
  std::shared_ptr<const Program> program = request.program;
  if (program == direct_paths()) {
    program = nullptr;
  } else if (!program && choices_.has_source() && !is_pair(request.kind)) {
    program = choices_.find(request);
  }
  if (program == request.program) return request;
  room = request;
  room.program = std::move(program);
  // A group with little memory, one of hundreds, has always room for the direct paths.
  if (!far && room.program && !Scheduled::has_room(*group_, room)) room.program = nullptr;
  return room;
}

}  // namespace pycollective
