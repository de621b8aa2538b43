#include "engine/group.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

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
  const Mask asleep = sleepers().fetch_and(bit(rank_), std::memory_order_seq_cst);
  // What lies in shared memory may be wrong: no rank is rung that there is not.
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && (asleep & bit(r)) != 0) members_[r]->ring();
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

std::byte* Group::staging(std::size_t index, std::size_t bytes) {
  if (staging_.size() <= index) staging_.resize(index + 1);
  if (staging_[index].size() < bytes) staging_[index].resize(bytes);
  return staging_[index].data();
}

void Group::leave() {
  if (left_.exchange(true)) return;
  if (world_.link) world_.link->close();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    mailboxes_[r]->left.fetch_or(bit(rank_), std::memory_order_acq_rel);
    members_[r]->ring();
  }
  const std::lock_guard lock(channels_mutex_);
  // Nobody asks for members any more: who drives has stopped, and the others look whether it is
  // closed. A group that is kept after its end may not keep the memory of peers that are gone.
  node_->retire(rank_, range_, channel_buffers_, channel_buffer_bytes_, std::move(members_));
  members_.clear();
}

}  // namespace pycollective
