// This process's end of shared memory: its own segment, and the peers attached to it.
//
// All groups of a process share one node, so that hundreds of groups cost neither hundreds of
// segments nor hundreds of threads. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/arena.h"
#include "transport/fork_guard.h"
#include "transport/peer.h"
#include "transport/segment.h"

namespace pycollective {

// The part of an own segment that a group uses: header, channels, data area.
struct MailboxRange {
  std::size_t offset = 0;
  std::size_t bytes = 0;       // all of it
  std::size_t data_bytes = 0;  // of the data area
  bool far = false;            // its group has ranks on other hosts
};

class Node {
 public:
  Node();
  ~Node();

  const Token& token() const { return own_->segment().token(); }
  int fd() const { return own_->segment().fd(); }
  const std::shared_ptr<Peer>& own() const { return own_; }
  bool forked() const { return guard_.forked(); }

  // Throws std::invalid_argument or std::system_error; see Segment::attach and Peer.
  void attach(const Token& token, int fd, pid_t pid);
  // A rank of the same process, run by another thread: shares its mapping, as sanitizers need.
  void attach_local(const Node& other);
  // nullptr where no such peer is attached.
  std::shared_ptr<Peer> find(const Token& token) const;
  std::size_t attached() const;  // segments, the own one included

  // Commits a zeroed mailbox for a group of `members`. Early groups get large data areas, later
  // ones small ones, so that the sum stays bounded. Throws std::system_error (ENOMEM). `far`: some
  // ranks are on other hosts, and messages to them had better be long.
  MailboxRange allocate_mailbox(int members, bool far = false);
  // What allocate_mailbox would commit now, give or take what reclaiming frees.
  std::size_t mailbox_bytes(int members, bool far = false) const;
  // Commits `bytes` (a multiple of the page size) for a channel.
  std::size_t allocate_buffer(std::size_t bytes);

  // Gives a group's memory back once no peer can touch it any more: all others have left or
  // died. Checked when a mailbox is allocated; and with it which peers are gone and in no group:
  // these are let go of. (Others stay, in a group or not: joining counts on it that of two ranks
  // both have attached each other, or neither.) `memory` of another kind, which the peers use as
  // long, is let go of then.
  void retire(Member me, const MailboxRange& mailbox, std::vector<std::size_t> buffers,
              std::size_t buffer_bytes, std::vector<std::shared_ptr<Peer>> members,
              std::shared_ptr<const void> memory = nullptr);

 private:
  struct Retired {
    Member me;
    MailboxRange mailbox;
    std::vector<std::size_t> buffers;
    std::size_t buffer_bytes;
    std::vector<std::shared_ptr<Peer>> members;
    std::shared_ptr<const void> memory;
  };
  using Memories = std::vector<std::shared_ptr<const void>>;
  std::size_t take(std::size_t bytes);
  Memories reclaim();  // to be let go of out of the lock: it may take long
  void forget_gone_peers();

  std::shared_ptr<Peer> own_;
  ForkGuard guard_;
  mutable std::mutex mutex_;
  Arena arena_;
  std::array<std::size_t, 2> committed_{};  // data areas: of groups on one host, between hosts
  std::map<Token, std::shared_ptr<Peer>> peers_;
  std::vector<Retired> retired_;
};

}  // namespace pycollective
