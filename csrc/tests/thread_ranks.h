// Ranks as threads of one process, over the very engine that processes use: what the sanitizers
// can see whole. Each has its own node; peers share its mapping, so that one address stands for
// each byte.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine/communicator.h"

namespace pycollective::testing {

class ThreadRanks {
 public:
  explicit ThreadRanks(int size) {
    for (int r = 0; r < size; ++r) {
      nodes_.push_back(std::make_shared<Node>());
      progress_.push_back(std::make_shared<Progress>(nodes_.back()));
    }
    for (int r = 0; r < size; ++r)
      for (int peer = 0; peer < size; ++peer)
        if (peer != r) nodes_[r]->attach_local(*nodes_[peer]);
  }

  int size() const { return static_cast<int>(nodes_.size()); }

  // One communicator a rank, over all ranks. `data_bytes` 0: as much as the nodes give.
  std::vector<std::shared_ptr<Communicator>> make_group(double timeout = 60,
                                                        std::size_t data_bytes = 0) {
    std::vector<Token> tokens;
    std::vector<std::size_t> offsets;
    std::vector<MailboxRange> mailboxes;
    for (const auto& node : nodes_) {
      mailboxes.push_back(node->allocate_mailbox(size()));
      tokens.push_back(node->token());
      offsets.push_back(mailboxes.back().offset);
    }
    std::vector<std::shared_ptr<Communicator>> group;
    for (int r = 0; r < size(); ++r)
      group.push_back(std::make_shared<Communicator>(
          std::make_unique<Group>(nodes_[r], Member(r), tokens, offsets, mailboxes[r],
                                  data_bytes != 0 ? data_bytes : mailboxes[r].data_bytes),
          progress_[r], timeout));
    return group;
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
          errors[r] = std::current_exception();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  std::vector<std::shared_ptr<Node>> nodes_;
  std::vector<std::shared_ptr<Progress>> progress_;
};

}  // namespace pycollective::testing
