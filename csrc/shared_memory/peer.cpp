#include "shared_memory/peer.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "shared_memory/futex.h"

namespace pycollective {

Peer::Peer(std::shared_ptr<Segment> segment, pid_t pid) : segment_(std::move(segment)), pid_(pid) {
  if (pid == 0) return;
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (pidfd_ >= 0) return;
  const int error = errno;
  const bool denied = error == EPERM || error == EACCES || error == ENOSYS;
  const char* why = error == EMFILE ? ""
                    : denied ? ", without which its death could not be seen, is denied or not "
                               "there: Linux 5.3 or later is needed and, in a container, a seccomp "
                               "profile that allows it"
                             : " (Linux 5.3 or later, in a shared pid namespace, is needed)";
  throw std::system_error(error, std::generic_category(),
                          "pidfd_open of peer " + std::to_string(pid) + why);
}

Peer::~Peer() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool Peer::alive() const {
  if (pidfd_ < 0) return true;
  pollfd ended = {pidfd_, POLLIN, 0};
  // Not "== 0": a signal may interrupt the call.
  return poll(&ended, 1, 0) != 1;
}

bool Peer::gone() const {
  return segment_->header().gone.load(std::memory_order_acquire) != 0 || !alive();
}

void Peer::ring() const {
  std::atomic<std::uint32_t>& doorbell = segment_->header().doorbell;
  doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(doorbell);
}

}  // namespace pycollective
