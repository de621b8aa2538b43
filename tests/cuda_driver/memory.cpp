#include "memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <utility>

#include "context.h"
#include "sanitizers.h"
#include "settings.h"

namespace standin {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kUnused = 0xff;  // NaN in every floating type, and no epoch that was ever published
constexpr int kFreed = 0xdd;

std::size_t in_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct Range {
  std::size_t bytes;
  Context* context;
  std::uint64_t id;
  std::uint64_t nonce;     // of an export, or of what was imported; 0: not exported
  std::uint64_t exporter;  // of an import: its offset, which with the nonce names it
  int opened;              // of an import: how many times
  int held = -1;           // of an import: the exporter's descriptor, with a lock on its nonce
};

class Lock {
 public:
  Lock() { take(); }
  ~Lock() { give(); }
  static void take() {
    while (held_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  static void give() { held_.clear(std::memory_order_release); }

 private:
  static std::atomic_flag held_;
};
std::atomic_flag Lock::held_ = ATOMIC_FLAG_INIT;

struct Memory {
  char* base = nullptr;
  std::size_t half = 0;  // bytes of each half
  int descriptor = -1;
  std::size_t next = kPage;  // never goes back: no address is given twice
  std::uint64_t ids = 0;
  std::map<std::uint64_t, Range> device;  // by the address in the lower half
  std::map<std::uint64_t, Range> host;    // by the host's address
  std::atomic<std::size_t> allocated[64] = {};
};
Memory& memory() {
  static Memory* const all = new Memory();
  return *all;
}

std::uint64_t number(const void* address) { return reinterpret_cast<std::uint64_t>(address); }
char* pointer(std::uint64_t address) { return reinterpret_cast<char*>(address); }

// The range that the address lies in, its one-past-the-end left out.
template <class Ranges>
auto containing(Ranges& ranges, std::uint64_t address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return ranges.end();
  --after;
  return address - after->first < after->second.bytes ? after : ranges.end();
}

Place place(Kind kind, const Range& range, std::uint64_t start, char* seen) {
  return {kind, range.context, start, range.bytes, seen};
}

// Takes addresses for so many bytes, a page without access before them, and one after.
bool take(std::size_t bytes, std::uint64_t* address) {
  Memory& all = memory();
  const std::size_t whole = in_pages(bytes) + 2 * kPage;
  if (bytes > all.half || whole > all.half - all.next) return false;
  *address = number(all.base) + all.next + kPage;
  all.next += whole;
  return true;
}

bool map(std::uint64_t address, std::size_t bytes, int descriptor, std::uint64_t offset) {
  // Bytes past the end, up to the page's, are there for all but the address sanitizer.
  char* const at = pointer(address + emulation_offset());
  if (mmap(at, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor,
           static_cast<off_t>(offset)) == MAP_FAILED)
    return false;
  madvise(at, in_pages(bytes), MADV_DONTFORK);
  poison(at + bytes, in_pages(bytes) - bytes);
  return true;
}

void unmap(std::uint64_t address, std::size_t bytes) {
  char* const at = pointer(address + emulation_offset());
  unpoison(at, in_pages(bytes));
  mmap(at, in_pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
}

// An exported allocation's nonce stands in the page before it, for those who open it.
bool write_nonce(std::uint64_t offset, std::uint64_t nonce) {
  return pwrite(memory().descriptor, &nonce, sizeof nonce, static_cast<off_t>(offset - kPage)) ==
         sizeof nonce;
}

// Who maps an exported allocation holds a shared lock on its nonce, which also ends with a process.
bool lock_nonce(int descriptor, std::uint64_t offset, short kind, bool* others = nullptr) {
  struct flock lock{};
  lock.l_type = kind;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(offset - kPage);
  lock.l_len = 1;
  if (fcntl(descriptor, others ? F_OFD_GETLK : F_OFD_SETLK, &lock) != 0) return false;
  if (others) *others = lock.l_type != F_UNLCK;
  return true;
}

void discard(std::map<std::uint64_t, Range>::iterator at) {
  Memory& all = memory();
  const auto& [address, range] = *at;
  if (range.opened == 0) {
    const std::uint64_t offset = address - number(all.base);
    char* const seen = pointer(address + emulation_offset());
    unpoison(seen, in_pages(range.bytes));
    for (std::size_t i = range.bytes; i < in_pages(range.bytes); ++i)
      if (static_cast<unsigned char>(seen[i]) != kUnused) {
        range.context->fail(CUDA_ERROR_ILLEGAL_ADDRESS, "memory was written past its end");
        break;
      }
    if (range.nonce != 0) {  // a peer that still reads it shall not find what was there
      write_nonce(offset, 0);
      std::memset(seen, kFreed, range.bytes);
    } else {
      fallocate(all.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(offset), static_cast<off_t>(in_pages(range.bytes)));
    }
    all.allocated[range.context->device] -= range.bytes;
  } else {
    lock_nonce(range.held, range.exporter, F_UNLCK);  // which a fork of this process may hold, too
    close(range.held);
  }
  unmap(address, range.bytes);
  all.device.erase(at);
}

}  // namespace

bool reserve_addresses() {
  Memory& all = memory();
  for (std::size_t half = std::size_t{256} << 30; half >= std::size_t{256} << 20; half /= 2) {
    void* const base =
        mmap(nullptr, 2 * half, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) continue;  // under a limit of addresses
    all.base = static_cast<char*>(base);
    all.half = half;
    all.descriptor = memfd_create("cuda-standin-memory", MFD_CLOEXEC);
    return all.descriptor >= 0 && ftruncate(all.descriptor, static_cast<off_t>(half)) == 0;
  }
  return false;
}

std::uint64_t emulation_offset() { return memory().half; }

Place find_place(std::uint64_t address) {
  const Lock lock;
  Memory& all = memory();
  const std::uint64_t base = number(all.base);
  if (address - base < all.half) {
    const auto found = containing(all.device, address);
    if (found == all.device.end()) return {Kind::kForbidden, nullptr, 0, 0, nullptr};
    return place(Kind::kDevice, found->second, found->first, pointer(address + all.half));
  }
  const auto mapped = containing(all.host, address + all.half);
  if (mapped != all.host.end())
    return place(Kind::kMapped, mapped->second, mapped->first - all.half,
                 pointer(address + all.half));
  if (address - base < 2 * all.half) return {Kind::kForbidden, nullptr, 0, 0, nullptr};
  const auto pinned = containing(all.host, address);
  if (pinned != all.host.end())
    return place(Kind::kPinned, pinned->second, pinned->first, pointer(address));
  return {Kind::kPageable, nullptr, 0, 0, pointer(address)};
}

CUresult allocate(Context& context, std::size_t bytes, CUdeviceptr* address) {
  if (bytes == 0 || !address) return CUDA_ERROR_INVALID_VALUE;
  const Lock lock;
  Memory& all = memory();
  std::uint64_t at;
  if (bytes > kBytesOfDevice - all.allocated[context.device] || !take(bytes, &at) ||
      !map(at, bytes, all.descriptor, at - number(all.base)))
    return CUDA_ERROR_OUT_OF_MEMORY;
  unpoison(pointer(at + all.half), in_pages(bytes));
  std::memset(pointer(at + all.half), kUnused, in_pages(bytes));
  poison(pointer(at + all.half) + bytes, in_pages(bytes) - bytes);
  all.allocated[context.device] += bytes;
  all.device.emplace(at, Range{bytes, &context, ++all.ids, 0, 0, 0});
  *address = at;
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address) {
  const Lock lock;
  const auto found = memory().device.find(address);
  if (found == memory().device.end() || found->second.opened > 0) return CUDA_ERROR_INVALID_VALUE;
  // The driver's documentation leaves open what this does.
  bool others = false;
  if (found->second.nonce != 0 &&
      !(lock_nonce(memory().descriptor, address - number(memory().base), F_WRLCK, &others) &&
        !others))
    found->second.context->fail(CUDA_ERROR_ILLEGAL_ADDRESS,
                                "memory was freed that another process maps");
  discard(found);
  return CUDA_SUCCESS;
}

std::size_t allocated_bytes(int device) { return memory().allocated[device]; }

CUresult export_memory(CUdeviceptr address, Exported* exported) {
  const Lock lock;
  Memory& all = memory();
  const auto found = all.device.find(address);
  if (found == all.device.end() || found->second.opened > 0) return CUDA_ERROR_INVALID_VALUE;
  const std::uint64_t offset = address - number(all.base);
  if (found->second.nonce == 0) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    Random draw(static_cast<std::uint64_t>(now.tv_nsec) ^
                (static_cast<std::uint64_t>(getpid()) << 32) ^ found->second.id);
    found->second.nonce = draw.next() | 1;
    if (!write_nonce(offset, found->second.nonce)) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *exported = {all.descriptor, offset, found->second.bytes, found->second.nonce};
  return CUDA_SUCCESS;
}

CUresult import_memory(Context& context, int descriptor, const Exported& exported,
                       CUdeviceptr* address) {
  const Lock lock;
  Memory& all = memory();
  std::uint64_t nonce = 0;
  if (exported.offset < kPage || exported.nonce == 0 ||
      pread(descriptor, &nonce, sizeof nonce, static_cast<off_t>(exported.offset - kPage)) !=
          sizeof nonce ||
      nonce != exported.nonce)
    return CUDA_ERROR_INVALID_VALUE;  // freed since, or never exported
  for (auto& [at, range] : all.device)
    if (range.opened > 0 && range.context == &context && range.nonce == nonce &&
        range.exporter == exported.offset) {
      ++range.opened;
      *address = at;
      return CUDA_SUCCESS;
    }
  std::uint64_t at;
  const int held = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (held < 0 || !lock_nonce(held, exported.offset, F_RDLCK) || !take(exported.bytes, &at) ||
      !map(at, exported.bytes, held, exported.offset)) {
    close(held);
    return CUDA_ERROR_MAP_FAILED;
  }
  all.device.emplace(at,
                     Range{exported.bytes, &context, ++all.ids, nonce, exported.offset, 1, held});
  *address = at;
  return CUDA_SUCCESS;
}

CUresult close_import(Context& context, CUdeviceptr address) {
  const Lock lock;
  const auto found = memory().device.find(address);
  if (found == memory().device.end() || found->second.opened == 0) return CUDA_ERROR_INVALID_VALUE;
  if (found->second.context != &context) return CUDA_ERROR_INVALID_CONTEXT;
  if (found->second.opened == 1)
    discard(found);
  else
    --found->second.opened;
  return CUDA_SUCCESS;
}

CUresult host_allocate(Context& context, std::size_t bytes, void** address) {
  if (bytes == 0 || !address) return CUDA_ERROR_INVALID_VALUE;
  void* const at =
      mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(at, kUnused, bytes);
  const Lock lock;
  memory().host.emplace(number(at), Range{bytes, &context, ++memory().ids, 0, 0, 0});
  *address = at;
  return CUDA_SUCCESS;
}

CUresult host_free(void* address) {
  const Lock lock;
  const auto found = memory().host.find(number(address));
  if (found == memory().host.end()) return CUDA_ERROR_INVALID_VALUE;
  munmap(address, in_pages(found->second.bytes));
  memory().host.erase(found);
  return CUDA_SUCCESS;
}

void before_fork() { Lock::take(); }

void after_fork_in_parent() { Lock::give(); }

void after_fork_in_child() {
  for (auto& [address, range] : memory().device)
    if (range.held >= 0) close(std::exchange(range.held, -1));
  Lock::give();
}

}  // namespace standin
