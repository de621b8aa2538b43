// The queues of a communicator: one for collectives, and one for each direction, peer and tag of
// messages. Not thread-safe but for a queue's atomics: requires the communicator's mutex_ held.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <utility>

#include "engine/pending.h"

namespace pycollective {

struct Queue {
  explicit Queue(std::uint64_t its_key) : key(its_key) {}

  const std::uint64_t key;
  std::list<std::shared_ptr<Pending>> items;
  // By some thread, which alone may drive it. A synchronous call clears it without the mutex.
  std::atomic<bool> driven{false};
  const Pending* driven_item = nullptr;  // the first item, or none: a synchronous call
  // An item has come behind a synchronous call. Its thread looks as it ends, but may just miss it.
  std::atomic<bool> has_successor{false};
  std::uint64_t call_order = 0;                             // of that call (Task::recv_order)
  std::uint64_t sequence = 0;                               // number of the last operation issued
  bool waits() const { return !driven && !items.empty(); }  // for a thread that drives it
  bool waits_for_call() const { return driven && driven_item == nullptr && !items.empty(); }
  void add(std::shared_ptr<Pending> item) {
    items.push_back(std::move(item));
    has_successor.store(true, std::memory_order_relaxed);
  }
};

class Queues {
 public:
  using Map = std::map<std::uint64_t, Queue>;  // so that a queue stays where it is

  Queues() : collectives_(made(0)) {}

  // Makes it if there is none.
  Queue& of(const Request& request) {
    return is_pair(request.kind) ? made(key_of(request.kind, request.root, request.tag))
                                 : collectives_;
  }
  // Messages are numbered by direction and peer, whatever their tags.
  std::uint64_t& sequence_of(Queue& queue) {
    return is_tagged(queue) ? made(queue.key & ~kTags).sequence : queue.sequence;
  }
  // Deletes a queue that is empty: a program may use ever new tags.
  void erase_if_empty(Queue& queue) {
    if (is_tagged(queue) && queue.items.empty() && !queue.driven) queues_.erase(queue.key);
  }
  // The first queue from `key` on that waits for a thread; null if there is none.
  Queue* first_waiting(std::uint64_t key) {
    auto next = queues_.lower_bound(key);
    while (next != queues_.end() && !next->second.waits()) ++next;
    return next == queues_.end() ? nullptr : &next->second;
  }
  Map& all() { return queues_; }
  const Map& all() const { return queues_; }

  // Receives take messages in the order of the calls. That needs a number (Task::recv_order) only
  // once a receive is from any rank.
  bool numbers(const Request& request) {
    if (request.kind != OpKind::kRecv) return false;
    from_any_ = from_any_ || request.root == kAnySource;
    return from_any_;
  }
  std::uint64_t next_order() { return ++recvs_; }
  // Whether the end of one of its operations may let other receives go on.
  bool may_let_others_go_on(const Queue& queue) const { return from_any_ && receives(queue); }
  // Whether no receive that was issued before `task` may still take a message of rank `source`.
  bool is_turn_of(const Task& task, int source) const {
    const int others = task.request->root == kAnySource ? source : kAnySource;
    const auto found = queues_.find(key_of(OpKind::kRecv, others, task.request->tag));
    if (found == queues_.end()) return true;
    const Queue& queue = found->second;
    if (queue.driven && queue.driven_item == nullptr) return queue.call_order >= task.recv_order;
    return queue.items.empty() || queue.items.front()->task().recv_order >= task.recv_order;
  }

 private:
  static constexpr std::uint64_t kTags = 0xffffffff;

  static std::uint64_t key_of(OpKind kind, int rank, int tag) {
    const auto receives = static_cast<std::uint64_t>(kind == OpKind::kRecv);
    const auto peer = static_cast<std::uint64_t>(rank - kAnySource);
    return (1 + 2 * peer + receives) << 32 | static_cast<std::uint32_t>(tag);
  }
  static bool is_tagged(const Queue& queue) { return (queue.key & kTags) != 0; }
  // As key_of() has it.
  static bool receives(const Queue& queue) { return queue.key != 0 && (queue.key >> 32 & 1) == 0; }
  Queue& made(std::uint64_t key) { return queues_.try_emplace(key, key).first->second; }

  Map queues_;
  Queue& collectives_;
  bool from_any_ = false;
  std::uint64_t recvs_ = 0;
};

}  // namespace pycollective
