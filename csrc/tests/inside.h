// What only tests do to a node or a group: the one friend of both.
#pragma once

#include <cerrno>
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
  // From now on the member is alive, to this rank's eyes, as long as that process is. `refusal`:
  // the errno with which this rank may not read its memory, or 0.
  static void set_process(Group& group, Member member, pid_t pid, int refusal = EPERM) {
    std::shared_ptr<Peer>& peer = group.members_[member.at()];
    peer = std::make_shared<Peer>(std::shared_ptr<Segment>(peer, &peer->segment()), pid);
    peer->refusal_ = refusal;
  }
  static void set_warn_after(Group& group, std::chrono::duration<double> time) {
    group.warn_after_ = time;
  }
};

}  // namespace pycollective::testing
