// One process's shared memory: a sealed, sparse memfd, committed piece by piece.
//
// Its first kSegmentBytes, which are for mailboxes, are always mapped. Behind them there are as
// many regions for arrays as the owner has added. A peer maps a region when it first reads there,
// so arrays cost nothing where nobody asks for them.
//
// It has no name in any file system, so nothing can leak or go stale: Linux frees the memory
// with the last mapping and descriptor, however the processes end.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "per_process.h"
#include "shared_memory/layout.h"

namespace pycollective {

namespace testing {
struct Inside;
}

using Token = std::array<std::uint64_t, 2>;  // names a segment, at random

class Segment {
 public:
  // Makes this process's own segment. Throws std::system_error.
  static std::shared_ptr<Segment> create();
  // Maps a peer's segment; `fd` stays the caller's. Throws std::invalid_argument if the file is not
  // a segment with that token that is sealed against shrinking (a shrunken one would kill its
  // readers).
  static std::shared_ptr<Segment> attach(int fd, const Token& token);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* at(std::size_t offset) const { return base_ + offset; }
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  const Token& token() const { return token_; }
  // Of the own segment; -1 for a peer's, and in a fork.
  int fd() const { return !own_ || guard_.forked() ? -1 : fd_; }

  // Commits a range of the own segment; this thread touches it. Throws std::system_error.
  void commit(std::size_t offset, std::size_t bytes);

  // Regions of arrays. Thread-safe.
  struct Region {
    std::size_t begin;  // in the file
    std::size_t end;
  };
  // Adds a region of at least `bytes` to the own segment: of as many as there are in all, if that
  // can be, so that there are few. One thread at a time. Throws std::system_error.
  Region add_region(std::size_t bytes);
  // Allocates a range of a region's memory, on this thread's NUMA node. Throws std::system_error.
  void commit_array(std::size_t offset, std::size_t bytes);
  // Gives the memory of a range back to Linux; the range can be committed again.
  void free_array(std::size_t offset, std::size_t bytes);
  // Where a range of the file lies in this process; null unless it lies in one region. Any numbers
  // are safe, since a peer may have written them. Throws std::system_error where a peer's region
  // cannot be mapped.
  std::byte* array_at(std::uint64_t offset, std::size_t bytes);
  // Where in the file a range of this process's memory lies; nothing unless it lies in one region.
  std::optional<std::uint64_t> array_offset(const void* memory, std::size_t bytes) const;

 private:
  Segment(std::byte* base, int fd, const Token& token, bool own)
      : base_(base), fd_(fd), token_(token), own_(own) {}
  std::byte* map_region(std::size_t number);
  bool allocate(std::size_t offset, std::size_t bytes);

  std::byte* base_;
  int fd_;
  Token token_;
  bool own_;
  ForkGuard guard_;
  // The mapped regions, in order. A base is stored after its range.
  struct MappedRegion {
    std::atomic<std::byte*> base{nullptr};
    Region range{};
  };
  std::array<MappedRegion, kMostRegions> regions_;
  std::mutex mapping_;
};

// Whether other processes could read these bytes of this one (not none), by their first and last.
// What a driver has mapped they cannot.
bool is_readable(const void* begin, std::size_t bytes);

// A process of this host whose segment is mapped here.
class Peer {
 public:
  // `pid` 0: a rank of this process (itself, or a thread in tests), which cannot die alone. Throws
  // std::system_error if the process cannot be watched.
  Peer(std::shared_ptr<Segment> segment, pid_t pid);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  Segment& segment() const { return *segment_; }
  const std::shared_ptr<Segment>& shared_segment() const { return segment_; }
  pid_t pid() const { return pid_; }
  // Asks a pidfd. (Forked children would hold a socket open, and a pid alone may be another process
  // by now.)
  bool alive() const;
  // Whether its node or its process is gone, so that nobody will join with that segment again.
  bool gone() const;
  // Copies what lies at `from` in that process, straight to `to` (process_vm_readv). Returns 0, or
  // an errno. ESRCH: it has ended, and another process may have its pid.
  int read(void* to, std::uint64_t from, std::size_t bytes) const;
  // Whether this process may read that one's memory: 0, or the errno that it was refused with.
  int refusal() const { return refusal_; }
  void wake() const;  // wakes all threads of that process that wait at its doorbell

 private:
  friend struct testing::Inside;
  std::shared_ptr<Segment> segment_;
  pid_t pid_;
  int pidfd_ = -1;
  int refusal_ = 0;
};

}  // namespace pycollective
