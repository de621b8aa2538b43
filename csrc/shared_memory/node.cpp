#include "shared_memory/node.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "per_process.h"

namespace pycollective {

namespace {

// Groups on one host and groups with ranks on others have a budget each. The data areas of a
// process add up to about that much, and kLeastData for each group beyond. The first three groups
// (nine between hosts) get all they can use: a compression state has one, and two between hosts.
// With larger budgets 300 groups would break their bound (tests/test_resources.py).
constexpr std::size_t kLeastData = std::size_t{32} << 10;
constexpr std::size_t kDataBudget = std::size_t{9} << 20;
constexpr std::size_t kMostData = std::size_t{1536} << 10;
// More than this for each peer makes no transfer faster (three slots of 128 KiB, and small
// buffers).
constexpr std::size_t kUsefulDataPerMember = std::size_t{448} << 10;

// Between hosts: three slots of parts of a megabyte.
constexpr std::size_t kInternodeDataBudget = std::size_t{48} << 20;
constexpr std::size_t kMostInternodeData = std::size_t{4} << 20;

std::size_t data_bytes_for(int members, bool internode, std::size_t committed) {
  const std::size_t budget = internode ? kInternodeDataBudget : kDataBudget;
  const std::size_t left = committed < budget ? budget - committed : 0;
  const std::size_t most =
      internode ? kMostInternodeData
                : std::min(kMostData, kUsefulDataPerMember * static_cast<std::size_t>(members));
  return to_pages(std::clamp(left / 4, kLeastData, most));
}

}  // namespace

Mailbox* find_mailbox(const Segment& segment, std::size_t offset, int members,
                      std::size_t data_bytes) {
  // Compared by subtraction: a sum of such numbers may wrap. The first page is the segment's
  // header.
  const std::size_t room = kSegmentBytes - mailbox_header_bytes(members);
  if (offset < kPage || offset % kPage != 0 || data_bytes < kLeastData || data_bytes % kPage != 0 ||
      data_bytes > room || offset > room - data_bytes)
    return nullptr;
  auto* mailbox = reinterpret_cast<Mailbox*>(segment.at(offset));
  const bool made =
      mailbox->members == static_cast<std::uint64_t>(members) && mailbox->data_bytes >= data_bytes;
  return made ? mailbox : nullptr;
}

struct Node::Mapping {
  Retired group;
  std::shared_ptr<Peer> own;
  Node* node;              // or nullptr: gone
  bool unmapping = false;  // by some thread
  bool unmapped = false;
};

struct Node::Mappings {
  std::mutex mutex;
  std::vector<std::shared_ptr<Mapping>> all;
};

Node::Mappings& Node::mappings() {
  static PerProcess<Mappings> mappings;
  return *mappings;
}

Node::Node()
    : own_(std::make_shared<Peer>(Segment::create(), 0)),
      arrays_(std::make_shared<ArrayHeap>(own_->shared_segment())) {
  arena_.give_back(kPage, kSegmentBytes - kPage);
  peers_[token()] = own_;
}

Node::~Node() {
  if (!forked()) {
    unmap_retired();
    reclaim();
  }
  {
    const std::lock_guard lock(mappings().mutex);
    for (const std::shared_ptr<Mapping>& each : mappings().all)
      if (each->node == this) each->node = nullptr;
  }
  // The last group is gone, so this process has left them all.
  if (!forked()) own_->segment().header().gone.store(1, std::memory_order_release);
}

void Node::attach(const Token& token, int fd, pid_t pid) {
  const std::lock_guard lock(mutex_);
  if (peers_.count(token) != 0) return;
  peers_[token] = std::make_shared<Peer>(Segment::attach(fd, token), pid);
}

std::shared_ptr<Peer> Node::find(const Token& token) const {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(token);
  return found == peers_.end() ? nullptr : found->second;
}

std::vector<pid_t> Node::processes() const {
  const std::lock_guard lock(mutex_);
  std::vector<pid_t> pids;
  for (const auto& [token, peer] : peers_) pids.push_back(peer->pid());
  return pids;
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

MailboxRange Node::allocate_mailbox(int members, bool internode) {
  if (members < 1 || members > kMaxMembers)
    throw std::invalid_argument("a group on one host has 1 to " + std::to_string(kMaxMembers) +
                                " ranks");
  reclaim();
  const std::lock_guard lock(mutex_);
  MailboxRange range;
  range.internode = internode;
  range.data_bytes = data_bytes_for(members, internode, committed_[internode]);
  range.bytes = mailbox_header_bytes(members) + range.data_bytes;
  range.offset = take(range.bytes);
  committed_[internode] += range.data_bytes;
  std::byte* memory = own_->segment().at(range.offset);
  std::memset(memory, 0, mailbox_header_bytes(members));
  auto* mailbox = new (memory) Mailbox();
  mailbox->members = static_cast<std::uint64_t>(members);
  mailbox->data_bytes = range.data_bytes;
  std::byte* half = memory + sizeof(Mailbox);
  for (int i = 0; i < members; ++i, half += kLine) new (half) SendingHalf();
  for (int i = 0; i < members; ++i, half += kLine) new (half) ReceivingHalf();
  return range;
}

std::size_t Node::mailbox_bytes(int members, bool internode) const {
  const std::lock_guard lock(mutex_);
  return mailbox_header_bytes(members) + data_bytes_for(members, internode, committed_[internode]);
}

std::size_t Node::allocate_buffer(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return take(bytes);
}

void Node::Retired::tell_unmapped() const {
  for (const Member each : Members(static_cast<int>(mailboxes.size())))
    if (each != me) mailboxes[each.at()]->unmapped.fetch_or(bit(me), std::memory_order_acq_rel);
}

bool Node::Retired::nobody_reads(const Mailbox& mailbox) const {
  const Mask left = mailbox.left.load(std::memory_order_acquire);
  const Mask unmapped = mailbox.unmapped.load(std::memory_order_acquire);
  for (const Member each : Members(static_cast<int>(members.size())))
    if (each != me && (left & unmapped & bit(each)) == 0 && members[each.at()]->alive())
      return false;
  return true;
}

void Node::retire(Retired group) {
  if (group.mapped) {
    auto mapping = std::make_shared<Mapping>(Mapping{std::move(group), own_, this});
    const std::lock_guard lock(mappings().mutex);
    mappings().all.push_back(std::move(mapping));
    return;
  }
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(group));
}

void Node::unmap_retired() {
  std::vector<std::shared_ptr<Mapping>> mine;
  {
    const std::lock_guard lock(mappings().mutex);
    mine.reserve(mappings().all.size());
    for (const std::shared_ptr<Mapping>& each : mappings().all) {
      if (each->unmapping || each->unmapped) continue;
      each->unmapping = true;
      mine.push_back(each);
    }
  }
  // Without the lock: it may take long.
  for (const std::shared_ptr<Mapping>& each : mine) {
    const bool unmapped = each->group.mapped->unmap_peers();
    if (unmapped) each->group.tell_unmapped();
    const std::lock_guard lock(mappings().mutex);
    each->unmapped = unmapped;
    each->unmapping = false;
  }
}

void Node::give_back(const Retired& group) {
  // find_mailbox() must not find it any more.
  reinterpret_cast<Mailbox*>(own_->segment().at(group.mailbox.offset))->members = 0;
  arena_.give_back(group.mailbox.offset, group.mailbox.bytes);
  committed_[group.mailbox.internode] -= group.mailbox.data_bytes;
  for (const std::size_t buffer : group.buffers) arena_.give_back(buffer, group.buffer_bytes);
}

// Destroys the mappings without the locks: that may take long.
void Node::reclaim_mapped() {
  std::vector<std::shared_ptr<Mapping>> free;
  {
    const std::lock_guard lock(mappings().mutex);
    std::vector<std::shared_ptr<Mapping>>& all = mappings().all;
    free.reserve(all.size());
    const auto over = [&](const std::shared_ptr<Mapping>& each) {
      if (!each->unmapped || (each->node != nullptr && each->node != this)) return false;
      const std::byte* mailbox = each->own->segment().at(each->group.mailbox.offset);
      if (!each->group.nobody_reads(*reinterpret_cast<const Mailbox*>(mailbox))) return false;
      free.push_back(each);
      return true;
    };
    all.erase(std::remove_if(all.begin(), all.end(), over), all.end());
  }
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Mapping>& each : free) {
    if (each->node == this) give_back(each->group);
    each->group.mapped->nobody_maps();
  }
}

void Node::reclaim() {
  if (forked()) return;  // it is the parent's
  reclaim_mapped();
  const std::lock_guard lock(mutex_);
  const auto over = [&](const Retired& group) {
    if (!group.nobody_reads(
            *reinterpret_cast<const Mailbox*>(own_->segment().at(group.mailbox.offset))))
      return false;
    give_back(group);
    return true;
  };
  retired_.erase(std::remove_if(retired_.begin(), retired_.end(), over), retired_.end());
  forget_gone_peers();
}

void Node::forget_gone_peers() {
  for (auto it = peers_.begin(); it != peers_.end();) {
    // Only this map holds it, so no group does; new references are made under the lock alone.
    const bool unused = it->second != own_ && it->second.use_count() == 1;
    it = unused && it->second->gone() ? peers_.erase(it) : std::next(it);
  }
}

}  // namespace pycollective
