// This rank's mailbox in its GPU's memory, its card: what peers need to map it; and how many blocks
// may wait there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels.h"
#include "cuda/mailbox.h"
#include "per_process.h"
#include "shared_memory/node.h"

namespace pycollective {

// Travels between ranks of one host, in memory that only they can reach.
struct DeviceCard {
  std::array<std::uint8_t, 16> process;  // random; ranks that are threads share it, and pointers
  std::array<char, 16> gpu;              // the GPU's uuid
  cuda::CUipcMemHandle handle;
  std::uint64_t address;  // in its own process
  cuda::MailboxShape shape;
  std::int32_t device;  // the number in its own process
  std::int32_t reserved;
};

// How many waiting blocks a communicator may have on its GPU.
//
// A block that waits for other GPUs keeps its place on the GPU. So all waiting blocks of this
// process, of all its communicators, must fit a quarter of the GPU
// (cuda::Kernels::blocks_that_wait). Then every launch finds a place, in whatever order ranks make
// the calls of several communicators.
// A new communicator takes half of what the others have left, and at least one block. Half, because
// 17 of an H200's 33 blocks have 1.1 MB of loads under way, by computation enough for its links,
// and because a program that splits its ranks uses the parts as much as the whole. Six
// communicators find a share that way.
class BlockShare {
 public:
  // A share of GPU number `device`, on which this process has at most `all` blocks. Throws
  // std::runtime_error if none is left.
  BlockShare(int device, int all);
  ~BlockShare() {
    if (!guard_.forked()) keep(0);
  }
  BlockShare(const BlockShare&) = delete;
  BlockShare& operator=(const BlockShare&) = delete;

  // Whether a block is left.
  static bool is_left(int device);
  // Whether some blocks will be free soon: end() was called for them.
  static bool some_end(int device);

  int blocks() const { return blocks_; }
  // Frees all but so many: no launch has more from now on. From any thread.
  void keep(int blocks);
  // Announces that all its blocks will be free once what is under way has ended.
  void end();

 private:
  int device_;
  std::atomic<int> blocks_{0};  // written under the lock
  bool ends_ = false;           // likewise
  const ForkGuard guard_;
};

class DeviceMailbox final : public MappedMemory {
 public:
  // Makes a cleared mailbox, and loads the kernels if that was not done before. Call
  // DeviceGroup::make_room() first. Throws std::runtime_error: no GPU, no images, no memory, no
  // share of its blocks left.
  DeviceMailbox(int device, const std::vector<std::string>& nvrtc_folders);
  // Frees it, unless it is exported. The driver waits until the GPU is idle.
  ~DeviceMailbox() override;
  DeviceMailbox(const DeviceMailbox&) = delete;
  DeviceMailbox& operator=(const DeviceMailbox&) = delete;

  cuda::Gpu& gpu() const { return gpu_; }
  const std::shared_ptr<const cuda::Kernels>& kernels() const { return kernels_; }
  cuda::CUdeviceptr address() const { return memory_; }
  const DeviceCard& card() const { return card_; }
  // Other processes may map it from now on. To free it then is undefined, so it stays until the
  // process ends unless nobody_maps() is called.
  void export_memory() { exported_ = true; }
  bool unmap_peers() noexcept override { return true; }  // a DeviceGroup maps them
  void nobody_maps() noexcept override { exported_ = false; }
  // No launch has more blocks from now on; other communicators may use the rest.
  void keep_blocks(std::uint32_t blocks) { share_.keep(static_cast<int>(blocks)); }
  // There are no more launches; its blocks are free once those under way have ended.
  void end_blocks() { share_.end(); }

 private:
  cuda::Gpu& gpu_;
  std::shared_ptr<const cuda::Kernels> kernels_;
  BlockShare share_;
  cuda::CUdeviceptr memory_ = 0;
  DeviceCard card_{};
  std::atomic<bool> exported_{false};
  const ForkGuard guard_;
};

}  // namespace pycollective
