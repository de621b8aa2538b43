// Ranks of one process over GPUs that map each other, of the stand-in or real: a stream, a mailbox
// and a piece of memory each, and PeerMemory over them.
#pragma once

#include <memory>
#include <vector>

#include "engine/gpu/peer_memory.h"
#include "tests/cuda_streams.h"
#include "tests/number_inputs.h"

namespace pycollective::testing {

// The process's: each with its primary context and the kernels, and access to all others.
class Devices {
 public:
  struct Device {
    cuda::CUcontext context = nullptr;
    std::unique_ptr<cuda::Kernels> kernels;
  };
  Devices() {
    devices_.resize(static_cast<std::size_t>(driver().devices));
    for (int d = 0; d < driver().devices; ++d) {
      cuda::CUdevice handle = 0;
      OK(driver().cuDeviceGet(&handle, d));
      OK(driver().cuDevicePrimaryCtxRetain(&at(d).context, handle));
      const Current current(at(d).context);
      at(d).kernels =
          std::make_unique<cuda::Kernels>(cuda::device_traits(d), std::vector<std::string>());
    }
    for (const Device& from : devices_)
      for (const Device& to : devices_) {
        const Current current(from.context);
        if (from.context != to.context) OK(driver().cuCtxEnablePeerAccess(to.context, 0));
      }
  }
  ~Devices() {
    for (Device& device : devices_) {
      const Current current(device.context);
      device.kernels.reset();
    }
  }
  int size() const { return static_cast<int>(devices_.size()); }
  Device& at(int device) { return devices_[static_cast<std::size_t>(device)]; }

 private:
  std::vector<Device> devices_;
};

struct Rank {
  Devices::Device* device = nullptr;
  CUstream stream = nullptr;
  CUdeviceptr mailbox = 0;
  CUdeviceptr memory = 0;  // the caller's
  std::unique_ptr<PeerMemory> peers;

  // All that is on the stream ends in so many seconds.
  void synchronize(double seconds = kLongest) const {
    const Current current(device->context);
    CHECK(is_idle_in(stream, seconds));
  }
  void write(std::size_t at, const Data& bytes) const {
    if (bytes.empty()) return;
    const Current current(device->context);
    OK(driver().cuMemcpyAsync(memory + at, reinterpret_cast<CUdeviceptr>(bytes.data()),
                              bytes.size(), stream));
    OK(driver().cuStreamSynchronize(stream));
  }
  Data read(std::size_t at, std::size_t size) const {
    Data bytes(size);
    if (bytes.empty()) return bytes;
    const Current current(device->context);
    OK(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(bytes.data()), memory + at, size,
                              stream));
    OK(driver().cuStreamSynchronize(stream));
    return bytes;
  }
};

// One group.
class DeviceRanks {
 public:
  static constexpr std::uint64_t kDeadline = 120'000'000'000;  // nanoseconds

  // On a device each, as far as there are as many, or all on one.
  DeviceRanks(Devices& devices, int size, const cuda::MailboxShape& shape, std::size_t memory_bytes,
              bool on_one = false, std::uint32_t first_chunk = 0) {
    std::vector<CUdeviceptr> mailboxes;
    for (int r = 0; r < size; ++r) {
      ranks_.emplace_back();
      ranks_.back().device = &devices.at(on_one ? 0 : r % devices.size());
      Rank& rank = ranks_.back();
      const Current current(rank.device->context);
      OK(driver().cuStreamCreate(&rank.stream, cuda::CU_STREAM_NON_BLOCKING));
      OK(driver().cuMemAlloc(&rank.mailbox, PeerMemory::mailbox_bytes(shape)));
      OK(driver().cuMemAlloc(&rank.memory, memory_bytes));
      PeerMemory::clear(rank.mailbox, shape, first_chunk);
      mailboxes.push_back(rank.mailbox);
    }
    for (int r = 0; r < size; ++r)
      at(r).peers = std::make_unique<PeerMemory>(*at(r).device->kernels, at(r).device->context,
                                                 Member(r), mailboxes, shape);
  }
  ~DeviceRanks() {
    synchronize();
    for (Rank& rank : ranks_) {
      rank.peers.reset();
      const Current current(rank.device->context);
      OK(driver().cuStreamDestroy(rank.stream));
      OK(driver().cuMemFree(rank.memory));
      OK(driver().cuMemFree(rank.mailbox));
    }
  }
  DeviceRanks(const DeviceRanks&) = delete;
  DeviceRanks& operator=(const DeviceRanks&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  void synchronize(double seconds = kLongest) const {
    for (const Rank& rank : ranks_) rank.synchronize(seconds);
  }
  void check_no_endings() const {
    for (const Rank& rank : ranks_) CHECK(!rank.peers->ending());
  }

 private:
  std::vector<Rank> ranks_;
};

}  // namespace pycollective::testing
