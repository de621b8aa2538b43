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
  // From now on the member is alive, to this rank's eyes, as long as that process is.
  static void set_process(Group& group, Member member, pid_t pid) {
    std::shared_ptr<Peer>& peer = group.members_[member.at()];
    peer = std::make_shared<Peer>(std::shared_ptr<Segment>(peer, &peer->segment()), pid);
  }
  // From now on the group's rank is refused where it reads a member's memory.
  static void refuse_reads(Group& group, Member member) {
    set_process(group, member, 0);
    group.members_[member.at()]->refusal_ = EPERM;
  }
  static void set_warn_after(Group& group, std::chrono::duration<double> time) {
    group.warn_after_ = time;
  }
};

}  // namespace pycollective::testing
