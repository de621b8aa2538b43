// A process of this host whose segment is mapped here.
#pragma once

#include <sys/types.h>

#include <memory>

#include "shared_memory/segment.h"

namespace pycollective {

class Peer {
 public:
  // `pid` 0: a rank of this process (itself, or a thread in tests), which cannot die alone. Throws
  // std::system_error if the process cannot be watched.
  Peer(std::shared_ptr<Segment> segment, pid_t pid);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  Segment& segment() const { return *segment_; }
  pid_t pid() const { return pid_; }
  // Asks a pidfd. (Forked children would hold a socket open, and a pid alone may be another process
  // by now.)
  bool alive() const;
  // Whether its node or its process is gone, so that nobody will join with that segment again.
  bool gone() const;
  void ring() const;  // wakes all threads of that process that wait at its doorbell

 private:
  std::shared_ptr<Segment> segment_;
  pid_t pid_;
  int pidfd_ = -1;
};

}  // namespace pycollective
