// Python's hold on this process's shared memory and progress thread.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <string>

#include "engine/progress.h"
#include "shared_memory/node.h"

namespace pycollective {

// Tokens travel through Python as 16 bytes.
Token token_from_bytes(const std::string& bytes);

// Python's Node: the node itself, the thread that serves its communicators, and the mailboxes that
// were allocated and not yet given to a communicator.
class NodeHandle {
 public:
  NodeHandle();

  MailboxRange allocate(int ranks, bool internode);
  // The mailbox at `offset`, which is the caller's from now on.
  MailboxRange take(std::size_t offset);
  // Gives back a mailbox that was not taken.
  void release(std::size_t offset);

  const std::shared_ptr<Node> node;
  const std::shared_ptr<Progress> progress;

 private:
  std::mutex mutex_;
  std::map<std::size_t, MailboxRange> allocated_;
};

}  // namespace pycollective
