// Ranks as threads of one process, over the very engine that processes use: what the sanitizers
// can see whole. Each has its own node; peers of a host share its mapping, so that one address
// stands for each byte.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "engine/communicator.h"
#include "tests/inside.h"

namespace pycollective::testing {

class ThreadRanks {
 public:
  explicit ThreadRanks(int size) : ThreadRanks(std::vector<int>{size}) {}
  // On several hosts; ranks of a host follow each other.
  explicit ThreadRanks(std::vector<int> host_sizes) : host_sizes_(std::move(host_sizes)) {
    for (const int size : host_sizes_) add_host(size);
  }

  int size() const { return static_cast<int>(nodes_.size()); }

  // As where no thread is to be had: whoever waits drives.
  void stop_progress() const {
    for (const auto& each : progress_) each->stop();
  }

  // One communicator a rank, over all ranks. `data_bytes` 0: as much as the nodes give.
  std::vector<std::shared_ptr<Communicator>> make_group(double timeout = 60,
                                                        std::size_t data_bytes = 0) {
    return make_communicators(make_groups(data_bytes, {}), timeout);
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

 protected:
  using Groups = std::vector<std::unique_ptr<Group>>;
  using LinkOf = std::function<std::shared_ptr<Link>(int rank)>;  // asked where hosts are several

  // A group a rank, over all ranks.
  Groups make_groups(std::size_t data_bytes, const LinkOf& link_of) {
    Groups groups;
    for (const int size : host_sizes_) {
      const std::size_t first = groups.size();
      std::vector<Token> tokens;
      std::vector<std::size_t> offsets;
      std::vector<MailboxRange> mailboxes;
      for (std::size_t r = first; r < first + static_cast<std::size_t>(size); ++r) {
        mailboxes.push_back(nodes_[r]->allocate_mailbox(size, several_hosts()));
        tokens.push_back(nodes_[r]->token());
        offsets.push_back(mailboxes.back().offset);
      }
      std::vector<int> near(tokens.size());
      std::iota(near.begin(), near.end(), static_cast<int>(first));
      for (int m = 0; m < size; ++m) {
        const MailboxRange& mailbox = mailboxes[Member(m).at()];
        const int rank = near[Member(m).at()];
        World world{7, rank, this->size(), near, nullptr, this->size()};
        if (several_hosts()) world.link = link_of(rank);
        const std::size_t room = data_bytes != 0 ? data_bytes : mailbox.data_bytes;
        groups.push_back(std::make_unique<Group>(nodes_[first + Member(m).at()], Member(m), tokens,
                                                 offsets, mailbox, room, std::move(world)));
      }
    }
    return groups;
  }

  std::vector<std::shared_ptr<Communicator>> make_communicators(Groups groups, double timeout) {
    std::vector<std::shared_ptr<Communicator>> made;
    for (std::size_t r = 0; r < groups.size(); ++r)
      made.push_back(std::make_shared<Communicator>(std::move(groups[r]), progress_[r], timeout));
    return made;
  }

 private:
  bool several_hosts() const { return host_sizes_.size() > 1; }

  void add_host(int size) {
    const std::size_t first = nodes_.size();
    for (int m = 0; m < size; ++m) {
      nodes_.push_back(std::make_shared<Node>());
      progress_.push_back(std::make_shared<Progress>(nodes_.back()));
    }
    for (std::size_t a = first; a < nodes_.size(); ++a)
      for (std::size_t b = first; b < nodes_.size(); ++b)
        if (a != b) Inside::attach(*nodes_[a], *nodes_[b]);
  }

  std::vector<int> host_sizes_;
  std::vector<std::shared_ptr<Node>> nodes_;
  std::vector<std::shared_ptr<Progress>> progress_;
};

// Ranks of one host, with a communicator each.
class ThreadGroup : public ThreadRanks {
 public:
  explicit ThreadGroup(int size, double timeout = 60)
      : ThreadRanks(size), all_(make_group(timeout)) {}
  Communicator* operator[](int rank) const { return all_[static_cast<std::size_t>(rank)].get(); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

 private:
  const std::vector<std::shared_ptr<Communicator>> all_;
};

}  // namespace pycollective::testing
