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
#pragma once

#include <atomic>

#include "per_process.h"

namespace pycollective {

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

}  // namespace pycollective
