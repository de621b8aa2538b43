// This rank's mailbox in its GPU's memory, before its group has met, and what the peers must know
// of it to map it.
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
#include "engine/gpu/block_share.h"
#include "fork_guard.h"
#include "shared_memory/node.h"

namespace pycollective {

// As it travels between ranks of one host, over memory that only they can reach.
struct DeviceCard {
  std::array<std::uint8_t, 16> process;  // random: ranks that are threads share it, and pointers
  std::array<char, 16> gpu;              // the GPU's uuid
  cuda::CUipcMemHandle handle;
  std::uint64_t address;  // in its own process
  cuda::MailboxShape shape;
  std::int32_t device;  // the number in its own process
  std::int32_t reserved;
};

class DeviceMailbox final : public MappedMemory {
 public:
  // Loads the kernels, if that is yet to be done, and makes a cleared mailbox. Throws
  // std::runtime_error: no GPU, no images, no memory, no share of its blocks left; whoever makes
  // one calls DeviceGroup::make_room() before.
  DeviceMailbox(int device, const std::vector<std::string>& nvrtc_folders);
  // Frees it, unless it is lent. The driver waits until the GPU has come to rest.
  ~DeviceMailbox() override;
  DeviceMailbox(const DeviceMailbox&) = delete;
  DeviceMailbox& operator=(const DeviceMailbox&) = delete;

  cuda::Gpu& gpu() const { return gpu_; }
  const std::shared_ptr<const cuda::Kernels>& kernels() const { return kernels_; }
  cuda::CUdeviceptr address() const { return memory_; }
  const DeviceCard& card() const { return card_; }
  // Other processes may map it from now on: to free it then is undefined, so that it is kept until
  // the process ends, if nobody_maps() is not called.
  void lend() { lent_ = true; }
  bool unmap_peers() noexcept override { return true; }  // who has mapped them is a DeviceGroup
  void nobody_maps() noexcept override { lent_ = false; }
  // No launch has more blocks from now on; others may use the rest.
  void keep_blocks(std::uint32_t blocks) { share_.keep(static_cast<int>(blocks)); }
  // There is no launch any more; it keeps none once those under way have ended.
  void end_blocks() { share_.end(); }

 private:
  cuda::Gpu& gpu_;
  std::shared_ptr<const cuda::Kernels> kernels_;
  BlockShare share_;
  cuda::CUdeviceptr memory_ = 0;
  DeviceCard card_{};
  std::atomic<bool> lent_{false};
  const ForkGuard guard_;
};

}  // namespace pycollective
