// send and recv on one host.
//
// Each direction of each pair of ranks has a channel: a buffer of two halves, and announcements.
//   announce  The sender announces its message. If the buffer is free, it writes its first chunks.
//   grant     The receiver looks through the announcements for its tag and grants one, if no other
//             message goes through the channel. It publishes what it has called itself, so both
//             sides compare before anything is read.
//   move      The sender fills the two halves in turn, and the receiver empties them.
//   copy      Or, of a long message that it may read in the sender's memory, the receiver copies
//             all from there (single_copy.h).
// A send is done when the receiver has all of it.
//
// A first chunk that was written early is overwritten if a message of another tag is granted first.
// Both sides see that by the number of chunks that have gone through the channel, and it is sent
// again. The receiver grants the next message once the sender has counted all chunks of the last.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <variant>

#include "engine/messages.h"
#include "engine/operation.h"
#include "engine/operations/internode_pair.h"

namespace pycollective {

class PairOperation : public Operation {
 protected:
  PairOperation(Group& group, const Task& task, std::uint64_t sequence);

  // Throws CollectiveFailure (kMismatch) where the two sides differ.
  void compare(std::uint64_t their_dtype, std::uint64_t their_count) const;
  std::uint64_t chunks() const { return end_ - begin_; }
  // It is read in the sender's memory: one chunk, whatever its length.
  void count_as_one_chunk() {
    end_ -= total_ - 1;
    total_ = 1;
  }
  // How many are written before the message is granted.
  std::uint64_t early_chunks() const { return std::min<std::uint64_t>(total_, 2); }
  std::size_t bytes_of(std::uint64_t chunk) const;

  Member peer_;
  std::size_t bytes_;
  std::uint64_t total_;      // chunks of this message
  std::uint64_t begin_ = 0;  // chunks through the channel before this message, and after it
  std::uint64_t end_;
  std::uint64_t next_ = 0;
  bool moving_ = false;  // granted
};

class Send final : public PairOperation {
 public:
  Send(Group& group, const Task& task, std::uint64_t sequence);
  void start() override { announce(); }
  State advance() override;
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override;

 private:
  bool find_place();
  Announcement& own_announcement(std::size_t place);
  bool announce();  // false: there is no free place
  bool granted();
  void write_chunk(std::uint64_t chunk);
  void finish();

  SendingHalf& mine_;
  ReceivingHalf& theirs_;
  Outgoing& local_;
  std::uint64_t number_ = 0;  // of the announcement
  std::size_t place_ = 0;
  std::uint64_t early_ = kNoChunk;  // the number of the first chunk, if it was written early
};

class Receive final : public PairOperation {
 public:
  Receive(Group& group, const Task& task, std::uint64_t sequence);
  ~Receive() override;
  // Whether a message with that tag is announced and can be received now.
  static bool is_there(Group& group, Member source, int tag);
  // Whether it has granted a message.
  bool has_begun() const { return number_ != 0; }

  void start() override {}
  State advance() override;
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override;

 private:
  bool grant();
  void read_chunk();
  void copy_from_sender();
  void release();

  ReceivingHalf& mine_;
  SendingHalf& theirs_;
  Incoming& local_;
  std::uint64_t number_ = 0;  // of the announcement that was granted
  bool early_ = false;        // its first chunks were written before the grant
  std::uint64_t source_ = 0;  // where it lies in the sender's process, if it is read there
  std::size_t copied_ = 0;    // bytes from there
};

// recv from any rank: looks for a message with its tag at all ranks, and receives the first.
// The error of a receive that its own rank's close() ends. The group has not failed.
class EndedByClose final : public CollectiveFailure {
 public:
  using CollectiveFailure::CollectiveFailure;
};

class ReceiveAny final : public Operation {
 public:
  ReceiveAny(Group& group, const Task& task, std::uint64_t sequence);
  ~ReceiveAny() override;

  void start() override;
  State advance() override;
  void compare_calls() const override;
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override;
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override { return group_.messenger() != nullptr; }

 private:
  // Begins to receive the first message there is; returns what the first advance() did, or null
  // where no rank has sent one. `kept`: as in PairCalls::take().
  std::optional<State> find(bool& kept);
  std::optional<State> try_rank(int rank, bool& kept);
  void stop_awaiting();
  // Whether any rank can still send: one that has closed its communicator cannot.
  bool somebody_is_there() const;

  Request named_;  // the request with the rank whose message it takes
  Task named_task_;
  std::variant<std::monostate, Receive, InternodePair> receive_;
  Operation* found_ = nullptr;
  bool awaits_ = false;
};

}  // namespace pycollective
