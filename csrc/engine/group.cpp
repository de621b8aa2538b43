#include "engine/group.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "engine/far/messenger.h"
#include "transport/futex.h"

namespace pycollective {
namespace {

int available_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

}  // namespace

Group::Group(std::shared_ptr<Node> node, int rank, const std::vector<Token>& tokens,
             const std::vector<std::size_t>& offsets, const MailboxRange& mailbox,
             std::size_t data_bytes, World world)
    : node_(std::move(node)),
      rank_(rank),
      size_(static_cast<int>(tokens.size())),
      data_bytes_(data_bytes),
      range_(mailbox),
      world_(std::move(world)),
      may_spin_(available_cores() >= std::max(size_, world_.beside)) {
  if (size_ < 1 || size_ > kMaxRanks || rank < 0 || rank >= size_ ||
      offsets.size() != tokens.size() || data_bytes > mailbox.data_bytes)
    throw std::invalid_argument("a group needs 1 to 64 ranks, each with its token and offset");
  if (world_.near.empty()) {
    world_.rank = rank;
    world_.size = size_;
    for (int r = 0; r < size_; ++r) world_.near.push_back(r);
  }
  if (static_cast<int>(world_.near.size()) != size_ || number(rank) != world_.rank ||
      (world_.size != size_ && !world_.link))
    throw std::invalid_argument("a group's ranks and its world's do not go together");
  for (int r = 0; r < size_; ++r) {
    std::shared_ptr<Peer> member = node_->find(tokens[r]);
    if (!member)
      throw std::invalid_argument("rank " + std::to_string(r) + "'s segment is not attached");
    if (offsets[r] % kPage != 0 ||
        offsets[r] + mailbox_header_bytes(size_) + data_bytes > kSegmentBytes)
      throw std::invalid_argument("rank " + std::to_string(r) + "'s mailbox lies outside");
    mailboxes_[r] = reinterpret_cast<Mailbox*>(member->segment().at(offsets[r]));
    members_.push_back(std::move(member));
  }
  if (world_.link) {
    std::vector<int> far;
    for (int number = 0; number < world_.size; ++number)
      if (member(number) < 0) far.push_back(number);
    messenger_ =
        std::make_unique<Messenger>(std::move(world_.link), world_.rank, world_.size,
                                    std::move(far), [peer = node_->own()] { peer->ring(); });
  }
}

Group::~Group() {
  if (!node_->forked()) leave();
}

std::size_t Group::allocate_channel_buffer(std::size_t bytes) {
  const std::lock_guard lock(channels_mutex_);
  channel_buffers_.reserve(channel_buffers_.size() + 1);
  const std::size_t offset = node_->allocate_buffer(bytes);
  channel_buffers_.push_back(offset);
  channel_buffer_bytes_ = bytes;
  return offset;
}

void Group::wake_peers() {
  // Whoever clears a bit wakes its owner, so each sleep costs one call into the kernel.
  Mask asleep = sleepers().fetch_and(bit(rank_), std::memory_order_seq_cst) & ~bit(rank_);
  for (int r = 0; asleep != 0; ++r, asleep >>= 1)
    if (asleep & 1) members_[r]->ring();
}

void Group::sleep(std::uint32_t doorbell, std::chrono::nanoseconds limit) const {
  futex_wait(node_->own()->segment().header().doorbell, doorbell, limit);
}

void Group::fail(FailureKind kind, const std::string& report) {
  if (!std::exchange(reported_, true)) {
    char* text = own().report;
    const std::size_t length = std::min(report.size(), sizeof(own().report) - 1);
    std::memcpy(text, report.data(), length);
    text[length] = '\0';
  }
  const std::uint64_t word = FailureRecord{kind, rank_}.pack();
  for (int r = 0; r < size_; ++r) {
    std::uint64_t none = 0;
    mailboxes_[r]->failure.compare_exchange_strong(none, word, std::memory_order_acq_rel);
  }
  for (int r = 0; r < size_; ++r) members_[r]->ring();
}

std::string Group::report_of(int reporter) const {
  const char* text = mailboxes_[reporter]->report;
  return std::string(text, strnlen(text, sizeof(Mailbox::report)));
}

std::string Group::describe(int rank) const {
  const pid_t pid = members_[rank]->pid();
  return "rank " + std::to_string(number(rank)) + (pid ? " (pid " + std::to_string(pid) + ")" : "");
}

int Group::member(int number) const {
  const auto found = std::find(world_.near.begin(), world_.near.end(), number);
  return found == world_.near.end() ? -1 : static_cast<int>(found - world_.near.begin());
}

std::shared_ptr<const void> Group::keep(const Request& request) const {
  // Its arrays, and the slots of this host, which messages go from and to.
  return std::make_shared<const std::pair<std::shared_ptr<const void>, decltype(members_)>>(
      request.keep, members_);
}

void Group::leave() {
  if (left_.exchange(true)) return;
  // Where the link has not let go of a slot, this mailbox may serve nobody else.
  const bool let_go = !messenger_ || messenger_->close();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    mailboxes_[r]->left.fetch_or(bit(rank_), std::memory_order_acq_rel);
    members_[r]->ring();
  }
  if (!let_go) return;
  const std::lock_guard lock(channels_mutex_);
  node_->retire(rank_, range_, channel_buffers_, channel_buffer_bytes_, members_);
}

}  // namespace pycollective
