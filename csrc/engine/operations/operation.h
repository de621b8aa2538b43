// One operation of one rank as a resumable state machine: what the caller's thread or the progress
// thread drives. It never blocks; it says when it is blocked, and on whom.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "engine/group.h"
#include "engine/task.h"

namespace pycollective {

enum class State { kDone, kProgressed, kBlocked };

class Operation {
 public:
  // `task` and its request outlive this.
  Operation(Group& group, const Task& task, std::uint64_t sequence)
      : group_(group), task_(task), request_(*task.request), sequence_(sequence) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Announces the call to the peers (and hands over a small payload). Once, before advance().
  virtual void start() = 0;
  // Does what can be done now: at most one chunk. Throws CollectiveFailure (kMismatch).
  virtual State advance() = 0;
  // Whether it is quick enough to be done on the thread that issued it asynchronously.
  virtual bool is_short() const { return false; }
  // Whether this rank needs nothing more from a member, be it dead or gone.
  virtual bool finished_by(Member member) const = 0;
  // Throws kMismatch where a rank that has called disagrees, while the operation waits for others.
  virtual void compare_calls() const {}
  // The ranks of other hosts that have not called, for messages; empty where none is.
  virtual std::string internode_absentees() const { return {}; }
  // The ranks of other hosts whose messages are not through yet, either way. Asked once
  // internode_absentees() names none: until then some of these may not have called.
  virtual std::set<int> internode_unfinished() const { return {}; }
  // Whether it awaits something that rings no doorbell, and must look again soon.
  virtual bool must_poll() const { return false; }
  // What of this rank's own it awaits, in words; empty where it awaits others.
  virtual std::string held_up() const { return {}; }
  // Seconds beyond its time that it may take to say itself for whom it has waited.
  virtual double grace() const { return 0; }
  // Whether it awaits a GPU, which rings no doorbell whatever links do.
  virtual bool awaits_device() const { return false; }
  // Whether the peers have no part in what is left, and what befalls them cannot undo it.
  virtual bool is_over() const { return false; }
  // Whether a member has called this operation.
  virtual bool called_by(Member member) const = 0;

  const Request& request() const { return request_; }
  std::uint64_t sequence() const { return sequence_; }
  Group& group() const { return group_; }

 protected:
  Group& group_;
  const Task& task_;
  const Request& request_;
  std::uint64_t sequence_;
};

}  // namespace pycollective
