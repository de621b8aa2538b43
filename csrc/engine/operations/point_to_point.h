// send and recv on one host: the messages of a tag from one rank to another, apart from all others.
//
// A sender ANNOUNCES what it has, and fills the channel's buffer with its first chunks if that is
// free. A receiver looks through the announcements for its tag and GRANTS one, when no other
// message goes through the channel; it says what it called itself, so that both see whether they
// agree, before anything is read. Then the sender fills the two halves of the buffer in turn, and
// the receiver empties them. m bytes are written and read once. A send is done when the receiver
// has it all.
//
// A first chunk that was put there early is lost when a message of another tag is granted before:
// the number of chunks that have gone through the channel says so, on both sides, and it is sent
// again. The receiver grants the next when the sender has counted all of the last.
#pragma once

#include <algorithm>

#include "engine/operations/messages.h"
#include "engine/operations/operation.h"

namespace pycollective {

class PairOperation : public Operation {
 protected:
  PairOperation(Group& group, const Task& task, std::uint64_t sequence);

  // Throws CollectiveFailure (kMismatch) where the two sides differ.
  void compare(std::uint64_t their_dtype, std::uint64_t their_count) const;
  std::uint64_t chunks() const { return end_ - begin_; }
  // That fill the buffer before they are asked for.
  std::uint64_t early_chunks() const { return std::min<std::uint64_t>(total_, 2); }
  std::size_t bytes_of(std::uint64_t chunk) const;

  Member peer_;
  std::size_t bytes_;
  std::uint64_t total_;      // chunks of this message
  std::uint64_t begin_ = 0;  // chunks moved through the channel before this message, and after it
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
  bool announce();  // false: there is no place for it
  bool granted();
  void write_chunk(std::uint64_t chunk);
  void finish();

  SendingHalf& mine_;
  ReceivingHalf& theirs_;
  Outgoing& local_;
  std::uint64_t number_ = 0;  // of the announcement
  std::size_t place_ = 0;
  std::uint64_t early_ = kNoChunk;  // as which the first chunk was put into the buffer
};

class Receive final : public PairOperation {
 public:
  Receive(Group& group, const Task& task, std::uint64_t sequence);
  ~Receive() override;
  // Whether a message of that tag is announced, and nothing keeps it from being received.
  static bool is_there(Group& group, Member source, int tag);
  // Whether one has been granted.
  bool has_begun() const { return number_ != 0; }

  void start() override {}
  State advance() override;
  bool finished_by(Member member) const override;
  bool called_by(Member member) const override;

 private:
  bool grant();
  void read_chunk();
  void release();

  ReceivingHalf& mine_;
  SendingHalf& theirs_;
  Incoming& local_;
  std::uint64_t number_ = 0;  // of the announcement that was granted
  bool early_ = false;        // its first chunks were put there before it was granted
};

}  // namespace pycollective
