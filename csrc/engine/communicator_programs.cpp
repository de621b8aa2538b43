// Where a request between hosts gets its program from.
#include <utility>

#include "engine/communicator.h"

namespace pycollective {

void Communicator::set_program_source(ProgramSource source) {
  {
    const std::lock_guard lock(mutex_);
    program_source_.swap(source);
  }
  source = nullptr;  // out of the lock: it may need the interpreter
}

const Request& Communicator::with_program(const Request& request, Request& room) const {
  if (group_->link() == nullptr) return request;
  group_->link()->poll();  // a failure elsewhere is then known
  if (request.program || request.kind == OpKind::kSend || request.kind == OpKind::kRecv)
    return request;
  ProgramSource source;
  {
    const std::lock_guard lock(mutex_);
    source = program_source_;
  }
  if (!source) return request;  // closed, and about to be refused
  room = request;
  room.program = source(request);
  return room;
}

}  // namespace pycollective
