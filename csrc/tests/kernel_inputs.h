// What the tests of kernels share: the SIMD levels there are, and blocks of memory that show what
// is touched outside of them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "tests/check.h"

namespace pycollective {

using Random = std::mt19937_64;
using Data = std::vector<std::byte>;

// fp16, bf16 and fp32: what is packed or compressed.
inline const Dtype kTypes[] = {Dtype::kFloat16, Dtype::kBFloat16, Dtype::kFloat32};

inline std::vector<SimdLevel> levels() {
  std::vector<SimdLevel> here;
  for (const SimdLevel level : kSimdLevels)
    if (level <= supported_simd_level()) here.push_back(level);
  return here;
}

// `size` bytes, `offset` after where a line begins, in a heap block of their very size, so that
// ASan sees a byte too far; without it, with a guard before and behind them.
class Room {
 public:
  Room(std::size_t size, std::size_t offset) : size_(size), offset_(offset) {
    void* memory = nullptr;
    CHECK(posix_memalign(&memory, 64, offset + size + kGuard) == 0);
    memory_.reset(static_cast<std::byte*>(memory));
    std::memset(memory, kPattern, offset + size + kGuard);
  }
  Room(const Data& data, std::size_t offset) : Room(data.size(), offset) {
    if (!data.empty()) std::memcpy(this->data(), data.data(), data.size());
  }
  std::byte* data() { return memory_.get() + offset_; }
  Data copy() { return Data(data(), data() + size_); }
  void check_guards() const {
    for (std::size_t i = 0; i < offset_; ++i) CHECK(memory_[i] == std::byte{kPattern});
    for (std::size_t i = 0; i < kGuard; ++i)
      CHECK(memory_[offset_ + size_ + i] == std::byte{kPattern});
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kGuard = 0;
#else
  static constexpr std::size_t kGuard = 64;
#endif
  static constexpr unsigned char kPattern = 0xA5;
  std::size_t size_, offset_;
  std::unique_ptr<std::byte[], decltype(&std::free)> memory_{nullptr, std::free};
};

}  // namespace pycollective
