// Ranks as threads of one process, on hosts that a fake network joins.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tests/fake_link.h"
#include "tests/thread_ranks.h"

namespace pycollective::testing {

class HostRanks : private ThreadRanks {
 public:
  // Ranks of a host follow each other. `data_bytes` 0: as much as the nodes give.
  HostRanks(const std::vector<int>& host_sizes, FakeNetwork& network, std::size_t data_bytes = 0)
      : ThreadRanks(host_sizes),
        groups_(make_groups(data_bytes, [&](int rank) { return network.link(rank); })) {}

  using ThreadRanks::run;
  using ThreadRanks::size;
  using ThreadRanks::stop_progress;

  std::unique_ptr<Group>& group(int rank) { return groups_[static_cast<std::size_t>(rank)]; }

  // A communicator a rank, over all of them; the groups are theirs from then on.
  std::vector<std::shared_ptr<Communicator>> make_communicators(double timeout = 60) {
    return ThreadRanks::make_communicators(std::move(groups_), timeout);
  }

 private:
  Groups groups_;
};

// The same, with a communicator each.
class HostGroup : public HostRanks {
 public:
  HostGroup(const std::vector<int>& host_sizes, FakeNetwork& network, double timeout = 60,
            std::size_t data_bytes = 0)
      : HostRanks(host_sizes, network, data_bytes), all_(make_communicators(timeout)) {}
  Communicator* operator[](int rank) const { return all_[static_cast<std::size_t>(rank)].get(); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }
  void close() const {
    run([&](int r) { (*this)[r]->close(); });
  }

 private:
  const std::vector<std::shared_ptr<Communicator>> all_;
};

}  // namespace pycollective::testing
