#include "shared_memory/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
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

// The descriptors of segments. A forked child closes them as it begins: a child that lives on would
// keep the memory of a dead rank. (Close-on-exec is not enough: data-loading workers are forks that
// execute nothing.)
class Descriptors {
 public:
  static int open() {
    return add("memfd_create",
               [] { return memfd_create("pycollective", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  }
  static int duplicate(int fd) {
    return add("duplicating a descriptor", [fd] { return fcntl(fd, F_DUPFD_CLOEXEC, 0); });
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

  template <class Make>
  static int add(const char* what, const Make& make) {
    const std::lock_guard lock(all().mutex_);
    all().open_.reserve(all().open_.size() + 1);
    const int fd = make();
    if (fd < 0) throw_errno(what);
    all().open_.push_back(fd);
    return fd;
  }
  // Never destroyed: segments may end after all else.
  static Descriptors& all() {
    static auto* const made = new Descriptors;
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

// MAP_FAILED, with errno, if it cannot be.
void* try_map(int fd, std::size_t offset, std::size_t bytes, int protection) {
  void* base = mmap(nullptr, bytes, protection, MAP_SHARED, fd, static_cast<off_t>(offset));
  // A forked child must not be able to write into the parent's collectives.
  if (base != MAP_FAILED) madvise(base, bytes, MADV_DONTFORK);
  return base;
}

std::byte* map_mailboxes(int fd) {
  void* base = try_map(fd, 0, kSegmentBytes, PROT_READ | PROT_WRITE);
  if (base == MAP_FAILED) throw_errno("mmap of a shared-memory segment");
  return static_cast<std::byte*>(base);
}

bool reaches(int fd, std::size_t end) {
  struct stat status;
  return fstat(fd, &status) == 0 && static_cast<std::size_t>(status.st_size) >= end;
}

// How long a file of this process may be.
rlim_t longest_file() {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// False, with errno, if it cannot be. The limit is asked first: Linux sends a signal (SIGXFSZ),
// which ends processes, to one that exceeds it.
bool lengthen(int fd, std::size_t bytes) {
  if (longest_file() < bytes) {
    errno = EFBIG;
    return false;
  }
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0;
}

constexpr std::size_t kSmallestRegion = std::size_t{64} << 20;
constexpr std::size_t kLargestRegion = std::size_t{1} << 45;  // more cannot be addressed

}  // namespace

std::shared_ptr<Segment> Segment::create() {
  const int fd = Descriptors::open();
  if (!lengthen(fd, kSegmentBytes) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    const int error = errno;
    Descriptors::close(fd);
    throw std::system_error(
        error, std::generic_category(),
        error == EFBIG
            ? "a rank's shared memory is a file of " + std::to_string(kSegmentBytes >> 20) +
                  " MiB, of which little is filled, and files of "
                  "this process may have " +
                  std::to_string(longest_file() >> 20) + " MiB: raise the limit (ulimit -f)"
            : "sealing a shared-memory segment");
  }
  Token token;
  std::byte* base = nullptr;
  try {
    if (getrandom(token.data(), sizeof(token), 0) != static_cast<ssize_t>(sizeof(token)))
      throw_errno("getrandom");
    base = map_mailboxes(fd);
  } catch (...) {
    Descriptors::close(fd);
    throw;
  }
  std::shared_ptr<Segment> segment(new Segment(base, fd, token, true));
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
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || !reaches(fd, kSegmentBytes))
    throw std::invalid_argument("the peer's file is not a sealed pycollective segment");
  const int kept = Descriptors::duplicate(fd);
  std::byte* base = nullptr;
  try {
    base = map_mailboxes(kept);
  } catch (...) {
    Descriptors::close(kept);
    throw;
  }
  std::shared_ptr<Segment> segment(new Segment(base, kept, token, false));
  const SegmentHeader& header = segment->header();
  if (header.magic != kSegmentMagic || header.token[0] != token[0] || header.token[1] != token[1])
    throw std::invalid_argument(
        "the peer's segment has another layout or token: both sides need the same version of "
        "pycollective");
  return segment;
}

Segment::~Segment() {
  // In a forked child the ranges are not mapped and the descriptor is closed: all may be used for
  // something else.
  if (guard_.forked()) return;
  munmap(base_, kSegmentBytes);
  for (const MappedRegion& each : regions_)
    if (std::byte* base = each.base) munmap(base, each.range.end - each.range.begin);
  Descriptors::close(fd_);
}

bool Segment::allocate(std::size_t offset, std::size_t bytes) {
  // In steps: where a signal interrupts a call, Linux before 6.10 undoes all that it has done.
  constexpr std::size_t kStep = std::size_t{256} << 10;
  for (const std::size_t end = offset + bytes; offset < end; offset += kStep) {
    const auto length = static_cast<off_t>(std::min(kStep, end - offset));
    while (fallocate(fd_, 0, static_cast<off_t>(offset), length) != 0)
      if (errno != EINTR) return false;
  }
  return true;
}

void Segment::commit(std::size_t offset, std::size_t bytes) {
  if (!allocate(offset, bytes)) throw_errno("committing shared memory");
  // The first touch decides the NUMA node and takes the page faults now, not in a collective.
  for (std::size_t i = 0; i < bytes; i += kPage)
    reinterpret_cast<std::atomic<std::uint8_t>*>(base_ + offset + i)->fetch_or(0);
}

Segment::Region Segment::add_region(std::size_t bytes) {
  std::size_t number = 0;
  while (number < kMostRegions && regions_[number].base != nullptr) ++number;
  if (number == kMostRegions)
    throw std::system_error(std::make_error_code(std::errc::not_enough_memory),
                            "all " + std::to_string(kMostRegions) +
                                " regions of this process's shared memory are in use, and none has "
                                "room: free arrays, or make the largest ones first");
  const std::size_t begin = number == 0 ? kSegmentBytes : regions_[number - 1].range.end;
  const std::size_t least = (bytes + kRegionStep - 1) / kRegionStep * kRegionStep;
  // Addresses may be limited (ulimit -v), and so may files (ulimit -f).
  for (const std::size_t size :
       {std::max({least, kSmallestRegion, begin - kSegmentBytes}), least}) {
    if (least > kLargestRegion) break;
    if (!reaches(fd_, begin + size) && !lengthen(fd_, begin + size)) continue;
    void* const base = try_map(fd_, begin, size, PROT_READ | PROT_WRITE);
    if (base == MAP_FAILED) continue;
    MappedRegion& made = regions_[number];
    made.range = {begin, begin + size};
    made.base.store(static_cast<std::byte*>(base), std::memory_order_release);
    header().region_ends[number].store(made.range.end, std::memory_order_release);
    return made.range;
  }
  throw std::system_error(std::make_error_code(std::errc::not_enough_memory),
                          "no room for " + std::to_string(bytes) +
                              " bytes of shared memory: raise the limit of addresses (ulimit -v) "
                              "or of files (ulimit -f)");
}

std::byte* Segment::map_region(std::size_t number) {
  if (own_) return nullptr;
  const std::lock_guard lock(mapping_);
  MappedRegion& region = regions_[number];
  if (std::byte* base = region.base) return base;
  const std::size_t begin = number == 0 ? kSegmentBytes : regions_[number - 1].range.end;
  const std::size_t end = header().region_ends[number].load(std::memory_order_acquire);
  if (end <= begin || end % kRegionStep != 0 || !reaches(fd_, end)) return nullptr;
  void* const base = try_map(fd_, begin, end - begin, PROT_READ);
  if (base == MAP_FAILED) throw_errno("mmap of a peer's arrays");
  region.range = {begin, end};
  region.base.store(static_cast<std::byte*>(base), std::memory_order_release);
  return region.base;
}

std::byte* Segment::array_at(std::uint64_t offset, std::size_t bytes) {
  for (std::size_t number = 0; number < kMostRegions; ++number) {
    std::byte* base = regions_[number].base.load(std::memory_order_acquire);
    if (base == nullptr) base = map_region(number);
    if (base == nullptr) return nullptr;
    const Region& range = regions_[number].range;
    if (offset < range.begin) return nullptr;
    if (offset < range.end)
      return bytes <= range.end - offset ? base + (offset - range.begin) : nullptr;
  }
  return nullptr;
}

std::optional<std::uint64_t> Segment::array_offset(const void* memory, std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  for (const MappedRegion& each : regions_) {
    const auto base = reinterpret_cast<std::uintptr_t>(each.base.load(std::memory_order_acquire));
    if (base == 0) return std::nullopt;
    const std::size_t size = each.range.end - each.range.begin;
    if (address >= base && address - base < size && bytes <= size - (address - base))
      return each.range.begin + (address - base);
  }
  return std::nullopt;
}

void Segment::commit_array(std::size_t offset, std::size_t bytes) {
  if (!allocate(offset, bytes)) throw_errno("committing shared memory");
}

void Segment::free_array(std::size_t offset, std::size_t bytes) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
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
    if (part == 0) return EFAULT;  // of the token alone
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
