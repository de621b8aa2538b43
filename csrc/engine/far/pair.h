// Send and receive between hosts: what was called, each to the other, then the data; a short
// message goes with the sender's call.
#pragma once

#include <vector>

#include "engine/far/messenger.h"
#include "engine/operation.h"

namespace pycollective {

class FarPair final : public Operation {
 public:
  FarPair(Group& group, const Request& request, std::uint64_t sequence);
  ~FarPair() override;

  void start() override;
  State advance() override;
  bool finished_by(Member) const override { return true; }  // of its own host nobody takes part
  bool called_by(Member) const override { return true; }
  std::string far_absentees() const override;
  bool must_poll() const override { return true; }

 private:
  bool sends() const { return request_.kind == OpKind::kSend; }
  bool hear();
  void begin_to_move();

  const CallNote mine_;
  const std::size_t bytes_;
  Parcel call_;  // theirs, once it is heard
  bool expecting_ = false;
  bool moving_ = false;
  std::vector<Ticket> data_;  // in pieces that any transport takes
};

}  // namespace pycollective
