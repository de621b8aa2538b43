// One operation of one rank, as a resumable state machine that the caller's thread or the progress
// thread drives. It never waits: it returns that it is blocked, and tells on whom.
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

  // Announces the call to the peers, with a small payload. Once, before advance().
  virtual void start() = 0;
  // Does what can be done now, at most one chunk. Throws CollectiveFailure (kMismatch).
  virtual State advance() = 0;
  // Whether an asynchronous call may finish it on the caller's thread.
  virtual bool is_short() const { return false; }
  // Whether this rank needs nothing more from a member, so that it may die or leave.
  virtual bool finished_by(Member member) const = 0;
  // While it waits for others: throws kMismatch if a rank that has called disagrees.
  virtual void compare_calls() const {}
  // The ranks of other hosts that have not called: "2, 3".
  virtual std::string internode_absentees() const { return {}; }
  // The ranks of other hosts that have called and whose messages, either way, are not done. Asked
  // only if internode_absentees() names none.
  virtual std::set<int> internode_unfinished() const { return {}; }
  // Whether it awaits something that may wake nobody, so that it must be driven again soon.
  virtual bool must_poll() const { return false; }
  // What it awaits on this rank itself, in words; empty if it awaits other ranks.
  virtual std::string held_up() const { return {}; }
  // Seconds after its timeout in which it may report by itself for whom it has waited.
  virtual double grace() const { return 0; }
  // Whether it awaits a GPU, which wakes nobody.
  virtual bool awaits_device() const { return false; }
  // Whether the peers have no part in what is left, so that their failures do not matter.
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
