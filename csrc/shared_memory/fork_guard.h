// Knows whether this process is a fork of the one that made an object.
//
// After fork the child has the parent's objects without its mappings (MADV_DONTFORK) and without
// its threads. Whatever would touch them asks here first.
#pragma once

#include <cstdint>

namespace pycollective {

class ForkGuard {
 public:
  ForkGuard();
  bool forked() const;  // a load and a compare: cheap enough for every call

 private:
  std::uint64_t born_;
};

}  // namespace pycollective
