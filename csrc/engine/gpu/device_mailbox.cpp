#include "engine/gpu/device_mailbox.h"

#include <sys/random.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "engine/gpu/peer_memory.h"
#include "per_process.h"

namespace pycollective {
namespace {

using cuda::check;
using cuda::driver;

// The driver's unit of allocation: peers map all of it, so nothing else may lie in it.
constexpr std::size_t kBlock = std::size_t{2} << 20;

struct ProcessToken {
  ProcessToken() {
    if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      throw std::runtime_error("no random numbers to be had");
  }
  std::array<std::uint8_t, 16> bytes{};
};
PerProcess<ProcessToken> this_process;

// One for each GPU, kept until the process ends: to unload kernels waits until the GPU is idle.
std::shared_ptr<const cuda::Kernels> kernels_of(cuda::Gpu& gpu,
                                                const std::vector<std::string>& nvrtc_folders) {
  struct Loaded {
    std::mutex mutex;
    std::map<int, std::shared_ptr<const cuda::Kernels>> by_gpu;
  };
  static PerProcess<Loaded> loaded;
  const std::lock_guard lock(loaded->mutex);
  std::shared_ptr<const cuda::Kernels>& kernels = loaded->by_gpu[gpu.traits().ordinal];
  if (!kernels) {
    const cuda::Current current(gpu.context());
    kernels = std::make_shared<const cuda::Kernels>(gpu.traits(), nvrtc_folders);
  }
  return kernels;
}

struct Taken {
  int all = 1;
  int blocks = 0;
  int shares = 0;
  int ending = 0;  // of them
};

struct Shares {
  std::mutex mutex;
  std::map<int, Taken> taken;  // by GPU
};

// Some mailboxes are destroyed only as the process ends, and use this then.
PerProcess<Shares> shares;

}  // namespace

BlockShare::BlockShare(int device, int all) : device_(device) {
  const std::lock_guard lock(shares->mutex);
  Taken& of_all = shares->taken[device];
  of_all.all = all;
  const int left = all - of_all.blocks;
  if (left < 1)
    throw std::runtime_error(
        "the blocks that may wait on GPU " + std::to_string(device) + " at once, " +
        std::to_string(all) + ", a quarter of it, are shared out among " +
        std::to_string(of_all.shares) +
        " communicators of this process: close those that are not needed before another is made");
  blocks_ = (left + 1) / 2;
  of_all.blocks += blocks_;
  ++of_all.shares;
}

bool BlockShare::is_left(int device) {
  const std::lock_guard lock(shares->mutex);
  const Taken& of_all = shares->taken[device];
  return of_all.blocks < of_all.all;
}

bool BlockShare::some_end(int device) {
  const std::lock_guard lock(shares->mutex);
  return shares->taken[device].ending > 0;
}

void BlockShare::end() {
  const std::lock_guard lock(shares->mutex);
  if (ends_ || blocks_ == 0) return;
  ends_ = true;
  ++shares->taken[device_].ending;
}

void BlockShare::keep(int blocks) {
  const std::lock_guard lock(shares->mutex);
  if (blocks >= blocks_) return;
  shares->taken[device_].blocks -= blocks_ - blocks;
  if (blocks == 0) {
    --shares->taken[device_].shares;
    if (ends_) --shares->taken[device_].ending;
  }
  blocks_ = blocks;
}

DeviceMailbox::DeviceMailbox(int device, const std::vector<std::string>& nvrtc_folders)
    : gpu_(cuda::Gpu::at(device)),
      kernels_(kernels_of(gpu_, nvrtc_folders)),
      share_(device, kernels_->blocks_that_wait()) {
  const cuda::Current current(gpu_.context());
  const cuda::MailboxShape shape{static_cast<std::uint32_t>(share_.blocks()),
                                 PeerMemory::kUsualSlot};
  const std::size_t bytes = (PeerMemory::mailbox_bytes(shape) + kBlock - 1) / kBlock * kBlock;
  check(driver().cuMemAlloc(&memory_, bytes), "cuMemAlloc");
  try {
    PeerMemory::clear(memory_, shape);
    card_.process = this_process->bytes;
    cuda::CUuuid uuid{};
    cuda::CUdevice handle = 0;
    check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
    check(driver().cuDeviceGetUuid(&uuid, handle), "cuDeviceGetUuid");
    std::copy(std::begin(uuid.bytes), std::end(uuid.bytes), card_.gpu.begin());
    check(driver().cuIpcGetMemHandle(&card_.handle, memory_), "cuIpcGetMemHandle");
  } catch (...) {
    static_cast<void>(driver().cuMemFree(memory_));
    throw;
  }
  card_.address = memory_;
  card_.shape = shape;
  card_.device = device;
}

DeviceMailbox::~DeviceMailbox() {
  if (guard_.forked() || exported_) return;  // it is the parent's, or peers may map it
  try {
    const cuda::Current current(gpu_.context());
    static_cast<void>(driver().cuMemFree(memory_));
  } catch (const cuda::DriverError&) {
    // The context is gone, and the memory with it.
  }
}

}  // namespace pycollective
