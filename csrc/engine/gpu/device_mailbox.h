// This rank's mailbox in its GPU's memory, and its card: what peers need to map it.
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
