// This process in shared memory: its own segment, and its attached peers.
//
// All groups of a process share one node, so hundreds of groups need neither hundreds of segments
// nor hundreds of threads. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "per_process.h"
#include "shared_memory/arena.h"
#include "shared_memory/array_heap.h"
#include "shared_memory/layout.h"
#include "shared_memory/segment.h"

namespace pycollective {

// The part of an own segment that a group uses: header, channels, data area.
struct MailboxRange {
  std::size_t offset = 0;
  std::size_t bytes = 0;       // all of it
  std::size_t data_bytes = 0;  // the data area
  bool internode = false;      // its group has ranks on other hosts
};

// The mailbox at `offset` of a segment, of a group of so many members, with a data area of at least
// `data_bytes`. Null if there is none; any numbers are safe, since they come from a store.
Mailbox* find_mailbox(const Segment& segment, std::size_t offset, int members,
                      std::size_t data_bytes);

// GPU memory that the ranks of a group map of each other, as one rank has it. Its owner frees it
// after all others have unmapped it, which may be long after they have left.
class MappedMemory {
 public:
  virtual ~MappedMemory() = default;
  // Unmaps the peers' memory. Returns false if that is not possible now: call it again later. May
  // wait for a GPU. One thread at a time.
  virtual bool unmap_peers() noexcept = 0;
  // No peer maps this rank's memory any more. Only after this call the destructor frees it.
  virtual void nobody_maps() noexcept = 0;
};

class Node {
 public:
  Node();
  ~Node();

  const Token& token() const { return own_->segment().token(); }
  int fd() const { return own_->segment().fd(); }
  const std::shared_ptr<Peer>& own() const { return own_; }
  bool forked() const { return guard_.forked(); }

  // For arrays that peers read in place.
  ArrayHeap& arrays() const { return *arrays_; }

  // Throws std::invalid_argument or std::system_error; see Segment::attach and Peer.
  void attach(const Token& token, int fd, pid_t pid);
  // Null if no such peer is attached.
  std::shared_ptr<Peer> find(const Token& token) const;
  // Of all that are attached, this one included; 0 for ranks of this process.
  std::vector<pid_t> processes() const;

  // Commits a zeroed mailbox for a group of `members`. Early groups get large data areas, later
  // ones small ones, so the sum stays bounded. `internode`: some ranks are on other hosts; messages
  // to them should be long. Throws std::system_error (ENOMEM).
  MailboxRange allocate_mailbox(int members, bool internode = false);
  // What allocate_mailbox would commit now; reclaiming may change that.
  std::size_t mailbox_bytes(int members, bool internode = false) const;
  // Commits `bytes` (a multiple of the page size) for a channel.
  std::size_t allocate_buffer(std::size_t bytes);

  // What a rank that has left a group still holds. Its bit in the peers' `left` is set; its bit in
  // `unmapped` is set only if it has no mapped memory.
  struct Retired {
    Member me;
    MailboxRange mailbox;
    std::vector<std::size_t> buffers;  // of channels
    std::size_t buffer_bytes;
    std::vector<std::shared_ptr<Peer>> members;  // by member, as is the next one
    std::vector<Mailbox*> mailboxes;
    std::shared_ptr<MappedMemory> mapped;  // or nullptr
    // Sets its bit in the peers' `unmapped`. Once: their mailboxes may serve other groups then.
    void tell_unmapped() const;
    // Whether all others have left and unmapped, or died; `mailbox` is this rank's.
    bool nobody_reads(const Mailbox& mailbox) const;
  };
  // Frees a group's memory once no peer can touch it any more: see reclaim().
  void retire(Retired group);
  // Unmaps the peers' memory of this process's retired groups, and tells them. May wait for GPUs.
  static void unmap_retired();
  // Frees the memory of retired groups that no peer can touch any more, because all others have
  // left and unmapped it, or died. Forgets peers that are gone and in no group. (Living peers stay
  // attached: joining relies on two ranks having attached each other both, or neither.) Each
  // allocate_mailbox() begins with it. May wait for GPUs as it frees their memory.
  void reclaim();

 private:
  friend struct testing::Inside;
  // A retired group whose ranks map each other's memory. It outlives its node, since peers may
  // unmap long after this process has left.
  struct Mapping;
  struct Mappings;
  static Mappings& mappings();

  std::size_t take(std::size_t bytes);
  void give_back(const Retired& group);
  void reclaim_mapped();
  void forget_gone_peers();

  std::shared_ptr<Peer> own_;
  std::shared_ptr<ArrayHeap> arrays_;
  ForkGuard guard_;
  mutable std::mutex mutex_;
  Arena arena_;
  std::array<std::size_t, 2> committed_{};  // data areas: of groups on one host, between hosts
  std::map<Token, std::shared_ptr<Peer>> peers_;
  std::vector<Retired> retired_;
};

}  // namespace pycollective
