#include "shared_memory/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "shared_memory/layout.h"

namespace pycollective {
namespace {

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// The descriptors of this process's own segments. A forked child closes them as it begins: a child
// that lives on would keep the memory of a dead rank. (Close-on-exec is not enough: data-loading
// workers are forks that execute nothing.)
class OwnDescriptors {
 public:
  static int open() {
    const std::lock_guard lock(all().mutex_);
    const int fd = memfd_create("pycollective", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw_errno("memfd_create");
    all().open_.push_back(fd);
    return fd;
  }

  static void close(int fd) {
    const std::lock_guard lock(all().mutex_);
    auto& open = all().open_;
    open.erase(std::remove(open.begin(), open.end(), fd), open.end());
    ::close(fd);
  }

 private:
  std::mutex mutex_;
  std::vector<int> open_;

  // Never destroyed: segments may end after all else.
  static OwnDescriptors& all() {
    static auto* const made = new OwnDescriptors;
    return *made;
  }
  // No fork begins while the list changes.
  static inline const int registered_ =
      pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); },
                     [] {
                       for (const int fd : all().open_) ::close(fd);
                       all().open_.clear();
                       all().mutex_.unlock();
                     });
};

std::byte* map_whole(int fd) {
  void* base = mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw_errno("mmap of a shared-memory segment");
  // A forked child must not be able to write into the parent's collectives.
  madvise(base, kSegmentBytes, MADV_DONTFORK);
  return static_cast<std::byte*>(base);
}

}  // namespace

std::shared_ptr<Segment> Segment::create() {
  const int fd = OwnDescriptors::open();
  if (ftruncate(fd, kSegmentBytes) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    OwnDescriptors::close(fd);
    throw std::system_error(error, std::generic_category(), "sealing a shared-memory segment");
  }
  Token token;
  std::byte* base = nullptr;
  try {
    if (getrandom(token.data(), sizeof(token), 0) != static_cast<ssize_t>(sizeof(token)))
      throw_errno("getrandom");
    base = map_whole(fd);
  } catch (...) {
    OwnDescriptors::close(fd);
    throw;
  }
  std::shared_ptr<Segment> segment(new Segment(base, fd, token));
  segment->commit(0, kPage);
  auto* header = new (base) SegmentHeader();
  header->token[0] = token[0];
  header->token[1] = token[1];
  header->address = reinterpret_cast<std::uintptr_t>(base);
  header->magic = kSegmentMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(int fd, const Token& token) {
  const int seals = fcntl(fd, F_GET_SEALS);
  struct stat status;
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd, &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != kSegmentBytes)
    throw std::invalid_argument("the peer's file is not a sealed pycollective segment");
  std::shared_ptr<Segment> segment(new Segment(map_whole(fd), -1, token));
  const SegmentHeader& header = segment->header();
  if (header.magic != kSegmentMagic || header.token[0] != token[0] || header.token[1] != token[1])
    throw std::invalid_argument(
        "the peer's segment has another layout or token: both sides need the same version of "
        "pycollective");
  return segment;
}

Segment::~Segment() {
  // In a forked child the range is not mapped and the descriptor is closed: both may be used for
  // something else.
  if (guard_.forked()) return;
  munmap(base_, kSegmentBytes);
  if (fd_ >= 0) OwnDescriptors::close(fd_);
}

void Segment::commit(std::size_t offset, std::size_t bytes) {
  // A signal may interrupt it at any page; the next call goes on from there.
  while (fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) throw_errno("committing shared memory");
  // The first touch decides the NUMA node and takes the page faults now, not in a collective.
  for (std::size_t i = 0; i < bytes; i += kPage)
    reinterpret_cast<std::atomic<std::uint8_t>*>(base_ + offset + i)->fetch_or(0);
}

Peer::Peer(std::shared_ptr<Segment> segment, pid_t pid) : segment_(std::move(segment)), pid_(pid) {
  refusal_ = read(nullptr, 0, 0);
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

int Peer::read(void* to, std::uint64_t from, std::size_t bytes) const {
  // The token comes with each read: no other process has it there, so these are that one's bytes.
  Token token{};
  const pid_t pid = pid_ != 0 ? pid_ : getpid();
  const SegmentHeader& header = segment_->header();
  auto* next = static_cast<std::byte*>(to);
  do {
    const iovec here[] = {{next, bytes}, {token.data(), sizeof(token)}};
    const iovec there[] = {
        {reinterpret_cast<void*>(from), bytes},
        {reinterpret_cast<void*>(header.address + offsetof(SegmentHeader, token)), sizeof(token)}};
    const ssize_t got = process_vm_readv(pid, here, 2, there, 2, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EFAULT;
    if (static_cast<std::size_t>(got) == bytes + sizeof(token))
      return token == segment_->token() ? 0 : ESRCH;
    // A part, to the end of some page. What forbids the rest is known from the next call.
    const std::size_t part = std::min(static_cast<std::size_t>(got), bytes);
    next += part, from += part, bytes -= part;
  } while (true);
}

bool is_readable(const void* begin, std::size_t bytes) {
  std::byte first_and_last[2];
  auto* const at = static_cast<std::byte*>(const_cast<void*>(begin));
  const iovec here = {first_and_last, sizeof(first_and_last)};
  const iovec there[] = {{at, 1}, {at + bytes - 1, 1}};
  return process_vm_readv(getpid(), &here, 1, there, 2, 0) == sizeof(first_and_last);
}

void Peer::wake() const {
  std::atomic<std::uint32_t>& doorbell = segment_->header().doorbell;
  doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(doorbell);
}

}  // namespace pycollective
