// Send and receive between hosts: what was called, each to the other, then the data; a short
// message goes with the sender's call. A receive answers before it has heard the call, so that the
// data need not wait for it.
#pragma once

#include <vector>

#include "engine/operations/messages.h"
#include "engine/operations/operation.h"

namespace pycollective {

class InternodePair final : public Operation {
 public:
  // `expects`: a receive that expects its call already (PairCalls::expect_if_there).
  InternodePair(Group& group, const Task& task, std::uint64_t sequence, bool expects = false);
  ~InternodePair() override;
  // Whether its data are too long to go with the call.
  static bool needs_lane(const Request& request) {
    return request.count * size_of(request.dtype) > kEagerBytes;
  }

  void start() override { begin(); }
  State advance() override;
  bool finished_by(Member) const override { return true; }  // of its own host nobody takes part
  bool called_by(Member) const override { return true; }
  std::string internode_absentees() const override;
  std::set<int> internode_unfinished() const override;
  bool must_poll() const override { return true; }

 private:
  bool rides() const { return !needs_lane(request_); }
  bool sends() const { return request_.kind == OpKind::kSend; }
  int theirs() const { return sends() ? kLanePairAnswer : kLanePairCall; }
  bool begin();  // false: its turn has not come, or there is no lane for its data
  bool hear(bool& kept);
  bool begin_to_move();
  template <class Act>
  void each_piece(const Act& act);

  PairCalls& calls_;
  PairCalls::Peer& peer_;
  NumberedCall mine_;
  const std::size_t bytes_;
  std::optional<DataLane> lane_;  // of data that need one
  MessageBuffer call_;            // theirs, once it is heard
  bool began_ = false;
  bool expecting_ = false;
  bool moving_ = false;
  std::vector<MessageHandle> data_;  // in pieces that any transport takes
};

}  // namespace pycollective
