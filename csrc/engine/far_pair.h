// Send and receive between hosts: what was called, then the data, over the link.
#pragma once

#include "engine/far_rendezvous.h"
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
  bool finished(Link::Ticket& ticket);

  CallNote mine_;
  CallNote theirs_;
  Link::Ticket call_ = 0;  // theirs
  Link::Ticket told_ = 0;  // mine
  Link::Ticket data_ = 0;
  bool moving_ = false;
};

}  // namespace pycollective
