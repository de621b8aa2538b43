// All ranks of a communicator, on however many hosts, as one of them sees them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pycollective {

class Link;

// A communicator's ranks, where the group that shares memory is some of them.
struct World {
  std::uint64_t id = 0;  // the same on all ranks, and another for each communicator
  int rank = 0;
  int size = 1;
  std::vector<int> near;       // the rank of each member of the group
  std::shared_ptr<Link> link;  // to the others; none where there are none
  int on_machine = 1;          // ranks on this machine, where it plays several hosts
};

}  // namespace pycollective
