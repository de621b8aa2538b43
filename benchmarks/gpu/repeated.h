// Large arrays whose sums tell orders apart, and what must come of them: a block of such numbers
// again and again, of which the CPU adds up one.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/driver.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/number_inputs.h"

namespace pycollective::cuda {

class Repeated {
 public:
  // Of `n` arrays of bfloat16, none longer than so many bytes.
  Repeated(int n, std::size_t bytes, Random& random)
      : block_(2 * std::min(kMostElements, bytes / 2)), sums_(block_) {
    std::vector<const void*> leaves;
    for (int leaf = 0; leaf < n; ++leaf) {
      Data numbers(block_);
      for (std::size_t at = 0; at < block_; at += 2)
        write_element(traits_of(Dtype::kBFloat16), numbers.data() + at, random);
      leaves_.push_back(std::move(numbers));
      leaves.push_back(leaves_.back().data());
    }
    const FloatEnvironment ieee;
    find_kernels(Dtype::kBFloat16, ReduceOp::kSum, active_simd_level())
        .reduce(leaves.data(), n, sums_.data(), nullptr, block_ / 2);
  }

  // Array `leaf`, of so many bytes. They are there when it returns.
  void write(CUdeviceptr to, int leaf, std::size_t bytes, CUstream stream) const {
    const Data& numbers = leaves_[static_cast<std::size_t>(leaf)];
    std::size_t written = std::min(block_, bytes);
    check(
        driver().cuMemcpyAsync(to, reinterpret_cast<CUdeviceptr>(numbers.data()), written, stream),
        "cuMemcpyAsync");
    for (std::size_t more = 0; written < bytes; written += more) {
      more = std::min(written, bytes - written);
      check(driver().cuMemcpyAsync(to + written, to, more, stream), "cuMemcpyAsync");
    }
    check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  }

  // That these are the arrays' sums.
  void check_sums(const Data& got) const {
    for (std::size_t at = 0; at < got.size(); at += block_)
      CHECK(std::memcmp(got.data() + at, sums_.data(), std::min(block_, got.size() - at)) == 0);
  }

 private:
  // A prime, so that no other piece of an array is the same as one.
  static constexpr std::size_t kMostElements = 1'048'573;
  std::size_t block_;  // bytes
  std::vector<Data> leaves_;
  Data sums_;
};

}  // namespace pycollective::cuda
