#include "engine/gpu/block_share.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "per_process.h"

namespace pycollective {
namespace {

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

}  // namespace pycollective
