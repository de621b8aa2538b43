// What tests alone do to a node or a group: the one friend of both.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>

#include "engine/group.h"

namespace pycollective::testing {

struct Inside {
  // Attaches a rank of the same process, run by another thread: they share its mapping, as
  // sanitizers need.
  static void attach(Node& node, const Node& other) {
    const std::lock_guard lock(node.mutex_);
    node.peers_[other.token()] = other.own_;
  }
  // Segments, the own one included.
  static std::size_t attached(const Node& node) {
    const std::lock_guard lock(node.mutex_);
    return node.peers_.size();
  }
  static void set_warn_after(Group& group, std::chrono::duration<double> time) {
    group.warn_after_ = time;
  }
};

}  // namespace pycollective::testing
