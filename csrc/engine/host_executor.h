// Steps of programs on the host's memory: done when they are handed over.
#pragma once

#include <vector>

#include "engine/executor.h"
#include "engine/group.h"

namespace pycollective {

class HostExecutor final : public Executor {
 public:
  HostExecutor(Group& group, const Request& request);

  std::byte* slots(Member member) const override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void combine(const Combining& each) override;
  void publish(std::size_t slot, std::uint64_t mark) override;
  bool has_published(Member member, std::size_t slot, std::uint64_t mark) override;
  std::uint64_t chunks_done() const override;
  void publish_done(std::uint64_t chunks) override;
  bool has_done(Member member, std::uint64_t chunks) const override;

 private:
  Group& group_;
  Kernels kernels_;
  std::vector<const void*> many_leaves_;  // room for more than a host has members
};

}  // namespace pycollective
