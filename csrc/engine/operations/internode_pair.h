// Send and receive between hosts. Each side tells the other what it has called, then the data go. A
// short message goes with the sender's call (eager). A receive tells what it has called before it
// has heard the sender's call, so the data need not wait for that.
#pragma once

#include <vector>

#include "engine/messages.h"
#include "engine/operation.h"

namespace pycollective {

class InternodePair final : public Operation {
 public:
  // `expects`: a receive whose call is expected already (PairCalls::expect_if_there).
  InternodePair(Group& group, const Task& task, std::uint64_t sequence, bool expects = false);
  ~InternodePair() override;
  // Whether the message is too long to go with the call.
  static bool needs_lane(const Request& request) {
    return request.count * size_of(request.dtype) > kEagerBytes;
  }

  void start() override { begin(); }
  State advance() override;
  bool finished_by(Member) const override { return true; }  // no member of this host takes part
  bool called_by(Member) const override { return true; }
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override { return true; }

 private:
  bool rides() const { return !needs_lane(request_); }
  bool sends() const { return request_.kind == OpKind::kSend; }
  int theirs() const { return sends() ? kLanePairAnswer : kLanePairCall; }
  bool begin();  // false: an earlier receive comes first, or no data lane is free
  bool hear(bool& kept);
  bool begin_to_move();
  template <class Act>
  void each_piece(const Act& act);

  PairCalls& calls_;
  PairCalls::Peer& peer_;
  NumberedCall mine_;
  const std::size_t bytes_;
  std::optional<DataLane> lane_;  // if the data need one
  MessageBuffer call_;            // the other side's, once it was heard
  bool began_ = false;
  bool expecting_ = false;
  bool moving_ = false;
  std::vector<MessageHandle> data_;  // one for each piece
};

}  // namespace pycollective
