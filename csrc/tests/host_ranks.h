// Ranks as threads of one process, on hosts that a fake network joins.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine/communicator.h"
#include "tests/fake_link.h"

namespace pycollective::testing {

class HostRanks {
 public:
  // Ranks of a host follow each other. `data_bytes` 0: as much as the nodes give.
  HostRanks(const std::vector<int>& host_sizes, FakeNetwork& network, std::size_t data_bytes = 0) {
    for (const int size : host_sizes) add_host(size);
    int first = 0;
    for (const int size : host_sizes) {
      make_groups(first, size, network, data_bytes);
      first += size;
    }
  }

  int size() const { return static_cast<int>(nodes_.size()); }
  std::unique_ptr<Group>& group(int rank) { return groups_[static_cast<std::size_t>(rank)]; }

  // A communicator a rank, over all of them; the groups are theirs from then on.
  std::vector<std::shared_ptr<Communicator>> make_communicators(double timeout = 60) {
    std::vector<std::shared_ptr<Communicator>> made;
    for (std::size_t r = 0; r < groups_.size(); ++r)
      made.push_back(std::make_shared<Communicator>(std::move(groups_[r]), progress_[r], timeout));
    return made;
  }

  // Runs `body(rank)` on one thread a rank; rethrows the first exception of any.
  void run(const std::function<void(int)>& body) const {
    std::vector<std::exception_ptr> errors(nodes_.size());
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r)
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (...) {
          errors[static_cast<std::size_t>(r)] = std::current_exception();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  void add_host(int size) {
    const std::size_t first = nodes_.size();
    for (int m = 0; m < size; ++m) {
      nodes_.push_back(std::make_shared<Node>());
      progress_.push_back(std::make_shared<Progress>(nodes_.back()));
    }
    for (std::size_t a = first; a < nodes_.size(); ++a)
      for (std::size_t b = first; b < nodes_.size(); ++b)
        if (a != b) nodes_[a]->attach_local(*nodes_[b]);
    total_ += size;
  }

  void make_groups(int first, int size, FakeNetwork& network, std::size_t data_bytes) {
    std::vector<Token> tokens;
    std::vector<std::size_t> offsets;
    std::vector<MailboxRange> mailboxes;
    std::vector<int> near;
    for (int m = 0; m < size; ++m) {
      const auto& node = nodes_[static_cast<std::size_t>(first + m)];
      mailboxes.push_back(node->allocate_mailbox(size, true));
      tokens.push_back(node->token());
      offsets.push_back(mailboxes.back().offset);
      near.push_back(first + m);
    }
    for (int m = 0; m < size; ++m) {
      const auto at = static_cast<std::size_t>(m);
      World world{7, first + m, total_, near, nullptr, total_};
      if (size != total_) world.link = network.link(first + m);
      const std::size_t room = data_bytes != 0 ? data_bytes : mailboxes[at].data_bytes;
      groups_.push_back(std::make_unique<Group>(nodes_[static_cast<std::size_t>(first + m)],
                                                Member(m), tokens, offsets, mailboxes[at], room,
                                                std::move(world)));
    }
  }

  int total_ = 0;
  std::vector<std::shared_ptr<Node>> nodes_;
  std::vector<std::shared_ptr<Progress>> progress_;
  std::vector<std::unique_ptr<Group>> groups_;
};

}  // namespace pycollective::testing
