#include "transport/node.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace pycollective {
namespace {

// The groups on one host and those with ranks on others have a budget each: data areas of a process
// add up to about that much, and kLeastData for each group beyond. The first three groups (nine
// between hosts) get all they can use: a state of compression has one, and two between hosts. With
// more, 300 groups would break their bound (tests/test_resources.py).
constexpr std::size_t kLeastData = std::size_t{32} << 10;
constexpr std::size_t kDataBudget = std::size_t{9} << 20;
constexpr std::size_t kMostData = std::size_t{1536} << 10;
// More than this for each peer makes no transfer faster (three slots of 128 KiB, and small
// buffers).
constexpr std::size_t kUsefulDataPerMember = std::size_t{448} << 10;

// Between hosts: three slots of parts of a megabyte.
constexpr std::size_t kFarDataBudget = std::size_t{48} << 20;
constexpr std::size_t kMostFarData = std::size_t{4} << 20;

// What peers may still read of another kind of memory ends with the process, not before.
void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex& mutex = *new std::mutex;
  static auto& kept = *new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

std::size_t to_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::size_t data_bytes_for(int members, bool far, std::size_t committed) {
  const std::size_t budget = far ? kFarDataBudget : kDataBudget;
  const std::size_t left = committed < budget ? budget - committed : 0;
  const std::size_t most =
      far ? kMostFarData
          : std::min(kMostData, kUsefulDataPerMember * static_cast<std::size_t>(members));
  return to_pages(std::clamp(left / 4, kLeastData, most));
}

}  // namespace

Node::Node() : own_(std::make_shared<Peer>(Segment::create(), 0)), arena_(kPage, kSegmentBytes) {
  peers_[token()] = own_;
}

Node::~Node() {
  if (!forked()) static_cast<void>(reclaim());
  for (Retired& each : retired_)
    if (each.memory) keep_for_good(std::move(each.memory));
  // The last group is gone, and with it this process has left them all.
  if (!forked()) own_->segment().header().gone.store(1, std::memory_order_release);
}

void Node::attach(const Token& token, int fd, pid_t pid) {
  const std::lock_guard lock(mutex_);
  if (peers_.count(token) != 0) return;
  peers_[token] = std::make_shared<Peer>(Segment::attach(fd, token), pid);
}

void Node::attach_local(const Node& other) {
  const std::lock_guard lock(mutex_);
  peers_[other.token()] = other.own_;
}

std::shared_ptr<Peer> Node::find(const Token& token) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(token);
  return found == peers_.end() ? nullptr : found->second;
}

std::size_t Node::attached() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

std::size_t Node::take(std::size_t bytes) {
  std::optional<std::size_t> offset = arena_.take(bytes);
  if (!offset)
    throw std::system_error(std::make_error_code(std::errc::not_enough_memory),
                            "this process's shared-memory segment is full: close communicators "
                            "that are no longer used");
  try {
    own_->segment().commit(*offset, bytes);
  } catch (...) {
    arena_.give_back(*offset, bytes);
    throw;
  }
  return *offset;
}

MailboxRange Node::allocate_mailbox(int members, bool far) {
  if (members < 1 || members > kMaxMembers)
    throw std::invalid_argument("a group on one host has 1 to " + std::to_string(kMaxMembers) +
                                " ranks");
  Memories memories;  // declared before the lock, so that they go after it
  const std::lock_guard lock(mutex_);
  memories = reclaim();
  MailboxRange range;
  range.far = far;
  range.data_bytes = data_bytes_for(members, far, committed_[far]);
  range.bytes = mailbox_header_bytes(members) + range.data_bytes;
  range.offset = take(range.bytes);
  committed_[far] += range.data_bytes;
  std::byte* memory = own_->segment().at(range.offset);
  std::memset(memory, 0, mailbox_header_bytes(members));
  new (memory) Mailbox();
  auto* channels = reinterpret_cast<Channel*>(memory + sizeof(Mailbox));
  for (int i = 0; i < 2 * members; ++i) new (channels + i) Channel();
  return range;
}

std::size_t Node::mailbox_bytes(int members, bool far) const {
  const std::lock_guard lock(mutex_);
  return mailbox_header_bytes(members) + data_bytes_for(members, far, committed_[far]);
}

std::size_t Node::allocate_buffer(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return take(bytes);
}

void Node::retire(Member me, const MailboxRange& mailbox, std::vector<std::size_t> buffers,
                  std::size_t buffer_bytes, std::vector<std::shared_ptr<Peer>> members,
                  std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  retired_.push_back(
      {me, mailbox, std::move(buffers), buffer_bytes, std::move(members), std::move(memory)});
}

Node::Memories Node::reclaim() {
  Memories memories;
  const auto nobody_reads = [&](const Retired& group) {
    const auto& mailbox = *reinterpret_cast<Mailbox*>(own_->segment().at(group.mailbox.offset));
    const Mask left = mailbox.left.load(std::memory_order_acquire);
    for (const Member each : Members(static_cast<int>(group.members.size())))
      if (each != group.me && (left & bit(each)) == 0 && group.members[each.at()]->alive())
        return false;
    return true;
  };
  for (auto it = retired_.begin(); it != retired_.end();) {
    if (!nobody_reads(*it)) {
      ++it;
      continue;
    }
    arena_.give_back(it->mailbox.offset, it->mailbox.bytes);
    committed_[it->mailbox.far] -= it->mailbox.data_bytes;
    for (const std::size_t buffer : it->buffers) arena_.give_back(buffer, it->buffer_bytes);
    if (it->memory) memories.push_back(std::move(it->memory));
    it = retired_.erase(it);
  }
  forget_gone_peers();
  return memories;
}

void Node::forget_gone_peers() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    // Held by this map alone, so by no group; only under the lock does anybody get another share.
    const bool unused = it->second != own_ && it->second.use_count() == 1;
    it = unused && it->second->gone() ? peers_.erase(it) : std::next(it);
  }
}

}  // namespace pycollective
