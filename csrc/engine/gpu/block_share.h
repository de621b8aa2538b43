// How many blocks a communicator may have wait at once on its GPU.
//
// Blocks that wait for other GPUs' keep their place until those have come, so all that this process
// may have wait there, whatever its communicators, together fit a quarter of the GPU
// (cuda::Kernels::blocks_that_wait): then every launch finds its place, in whatever order ranks
// make the calls of several communicators. Each communicator takes half of what the others have
// left, and at least one block, when it is made: halves, because 17 of an H200's 33 blocks have
// 1.1 MB of loads on their way, enough for its links by computation, and because a program that
// splits its ranks uses the parts as much as the whole. Six such communicators find a share there.
#pragma once

#include <atomic>

#include "fork_guard.h"

namespace pycollective {

class BlockShare {
 public:
  // Of the GPU of this number, where all shares of this process are at most `all` blocks. Throws
  // std::runtime_error where none is left.
  BlockShare(int device, int all);
  ~BlockShare() {
    if (!guard_.forked()) keep(0);
  }
  BlockShare(const BlockShare&) = delete;
  BlockShare& operator=(const BlockShare&) = delete;

  // Whether a block is left; true where nobody has asked yet.
  static bool is_left(int device);
  // Whether some are to be given back soon: end() has been called.
  static bool some_end(int device);

  int blocks() const { return blocks_; }
  // Gives the others back: no launch has more than so many from now on. From any thread.
  void keep(int blocks);
  // Says that it keeps none, as soon as what is under way has ended.
  void end();

 private:
  int device_;
  std::atomic<int> blocks_{0};  // written under the lock
  bool ends_ = false;           // likewise
  const ForkGuard guard_;
};

}  // namespace pycollective
