// This rank's mailbox in its GPU's memory, before its group has met, and what the peers must know
// of it to map it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/kernels.h"
#include "cuda/mailbox.h"

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

class DeviceMailbox {
 public:
  // Loads the kernels, if that is yet to be done, and makes a cleared mailbox. Throws
  // std::runtime_error: no GPU, no images, no memory.
  DeviceMailbox(int device, const std::vector<std::string>& nvrtc_folders);
  // Frees it. The driver waits until the GPU has come to rest.
  ~DeviceMailbox();
  DeviceMailbox(const DeviceMailbox&) = delete;
  DeviceMailbox& operator=(const DeviceMailbox&) = delete;

  cuda::Gpu& gpu() const { return gpu_; }
  const std::shared_ptr<const cuda::Kernels>& kernels() const { return kernels_; }
  cuda::CUdeviceptr address() const { return memory_; }
  const DeviceCard& card() const { return card_; }

 private:
  cuda::Gpu& gpu_;
  std::shared_ptr<const cuda::Kernels> kernels_;
  cuda::CUdeviceptr memory_ = 0;
  DeviceCard card_{};
};

}  // namespace pycollective
