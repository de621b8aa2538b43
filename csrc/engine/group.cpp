#include "engine/group.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "engine/cores.h"
#include "engine/internode/messenger.h"
#include "engine/messages.h"
#include "kernels/copy.h"
#include "shared_memory/layout.h"

namespace pycollective {
namespace {

// A thread moves once it has found others on its core in so many calls in a row.
constexpr int kSharedWaits = 2;

// Messages are told apart by size in steps of four times: below 32 KiB, below 128 KiB, and so on.
constexpr int kBitsOfLeast = 15;
constexpr std::size_t kSizes = 8;
constexpr std::size_t kLarge = 3;  // from 512 KiB on

std::uint32_t current_core() { return static_cast<std::uint32_t>(sched_getcpu() + 1); }

bool ranks_have_cores(const Node& node, int ranks) {
  std::vector<cpu_set_t> allowed;
  for (const pid_t pid : node.processes())
    if (const auto cores = allowed_cores(pid)) allowed.push_back(*cores);
  return each_has_a_core(allowed, std::max(ranks - static_cast<int>(allowed.size()), 0));
}

bool move_from_environment() {
  const char* const wanted = std::getenv("PYCOLLECTIVE_MOVE");
  if (wanted == nullptr || *wanted == '\0' || std::string_view(wanted) == "on") return true;
  if (std::string_view(wanted) == "off") return false;
  throw std::invalid_argument(std::string("PYCOLLECTIVE_MOVE=") + wanted +
                              " is not one of on, off");
}

// Whether Linux may copy so byte by byte: on AMD's Zen 3 and 4 its `rep movsb` does where the
// destination lies a little behind the source modulo a page.
bool is_copied_by_bytes(const void* to, std::uint64_t from) {
  const std::uint64_t distance = (reinterpret_cast<std::uintptr_t>(to) - from) % kPage;
  return distance > 0 && distance < 64;
}

}  // namespace

Group::Group(std::shared_ptr<Node> node, Member me, const std::vector<Token>& tokens,
             const std::vector<std::size_t>& offsets, const MailboxRange& mailbox,
             std::size_t data_bytes, World world)
    : node_(std::move(node)),
      me_(me),
      size_(static_cast<int>(tokens.size())),
      data_bytes_(data_bytes),
      range_(mailbox),
      world_(std::move(world)),
      may_move_(move_from_environment()) {
  if (size_ < 1 || size_ > kMaxMembers || me.index() < 0 || me.index() >= size_ ||
      offsets.size() != tokens.size() || tokens[me.at()] != node_->token() ||
      offsets[me.at()] != mailbox.offset)
    throw std::invalid_argument("a group needs 1 to " + std::to_string(kMaxMembers) +
                                " members, each with its token and offset");
  if (world_.local_ranks.empty()) {
    world_.rank = me.index();
    world_.size = size_;
    for (const Member each : members()) world_.local_ranks.push_back(each.index());
  }
  // Ascending, so that on one host, where the direct paths run, rank r is member r.
  const auto& local = world_.local_ranks;
  if (static_cast<int>(local.size()) != size_ || rank_of(me) != world_.rank ||
      world_.size < size_ || world_.size > kCountableRanks || local.front() < 0 ||
      local.back() >= world_.size ||
      std::adjacent_find(local.begin(), local.end(), std::greater_equal<>()) != local.end() ||
      (world_.size != size_ && !world_.link))
    throw std::invalid_argument("a group's ranks and its world's do not go together");
  for (const Member each : members()) {
    std::shared_ptr<Peer> peer = node_->find(tokens[each.at()]);
    const std::size_t offset = offsets[each.at()];
    if (!peer)
      throw std::invalid_argument("rank " + std::to_string(rank_of(each)) +
                                  "'s segment is not attached");
    mailboxes_[each.at()] = find_mailbox(peer->segment(), offset, size_, data_bytes);
    if (mailboxes_[each.at()] == nullptr)
      throw std::invalid_argument("rank " + std::to_string(rank_of(each)) +
                                  " has no mailbox for this group at offset " +
                                  std::to_string(offset) + " of its segment with " +
                                  std::to_string(data_bytes) + " bytes of data");
    members_.push_back(std::move(peer));
  }
  for (const OperationTraits& traits : kOperationTable) {
    // Who only gives writes again and again what others have read: plain stores cost it ten times
    // as much where caches are far, streaming ones twice as much where they are near. And through
    // slots its core does half of the work of a large message.
    const bool gives = traits.rooted && !traits.reduces;
    small_stores_.emplace_back(gives);
    for (std::size_t size = 0; size < kSizes; ++size)
      ways_.push_back({Chooser(gives), Chooser(gives && size >= kLarge)});
  }
  may_spin_ = ranks_have_cores(*node_, std::max(size_, world_.on_machine));
  const auto own_cores = allowed_cores(0);
  has_one_core_ = own_cores && CPU_COUNT(&*own_cores) == 1;
  if (world_.link) {
    std::vector<int> others;
    for (int rank = 0; rank < world_.size; ++rank)
      if (!member_of(rank)) others.push_back(rank);
    finish_deferred_closes();
    messenger_ =
        std::make_shared<Messenger>(std::move(world_.link), world_.id, world_.rank,
                                    std::move(others), [peer = node_->own()] { peer->wake(); });
  }
  messages_ = std::make_unique<Messages>(size_, messenger_.get());
}

Group::Ways& Group::ways(OpKind kind, std::size_t bytes) {
  const int bits = bytes == 0 ? 0 : 64 - __builtin_clzll(bytes);
  const auto size = static_cast<std::size_t>(std::max(bits - kBitsOfLeast + 1, 0)) / 2;
  return ways_[static_cast<std::size_t>(kind) * kSizes + std::min(size, kSizes - 1)];
}

Group::~Group() {
  if (node_->forked())
    // It is the parent's: it must send nothing, and end nothing, in this process.
    static_cast<void>(new std::shared_ptr<Messenger>(std::move(messenger_)));
  else
    leave();
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
  // The thread that clears a bit wakes its owner, so each sleep costs one system call.
  const Mask asleep = sleepers().fetch_and(bit(me_), std::memory_order_seq_cst);
  // Peers may have set any bits: wake only members that exist.
  for (const Member each : members())
    if (each != me_ && (asleep & bit(each)) != 0) members_[each.at()]->wake();
}

void Group::publish_core() {
  const std::uint32_t core = current_core();
  if (own().core.load(std::memory_order_relaxed) != core)
    own().core.store(core, std::memory_order_relaxed);
}

bool Group::shares_core() const {
  const std::uint32_t core = current_core();
  if (core == 0) return false;  // Linux does not tell
  for (const Member each : members())
    if (each != me_ && mailbox(each).core.load(std::memory_order_relaxed) == core &&
        (sleepers().load(std::memory_order_relaxed) & bit(each)) == 0)
      return true;
  return false;
}

void Group::note_shared_core(bool shared) {
  if (!shared) {
    shared_waits_.store(0, std::memory_order_relaxed);
    return;
  }
  if (!may_move_ || shared_waits_.fetch_add(1, std::memory_order_relaxed) + 1 < kSharedWaits)
    return;
  shared_waits_.store(0, std::memory_order_relaxed);
  cpu_set_t taken;
  CPU_ZERO(&taken);
  for (const Member each : members()) {
    const std::uint32_t core = mailbox(each).core.load(std::memory_order_relaxed);
    if (each != me_ && core > 0 && core <= CPU_SETSIZE) CPU_SET(core - 1, &taken);
  }
  // Nowhere meanwhile: or the others would see it here still, and move after it.
  own().core.store(0, std::memory_order_relaxed);
  move_off(taken);
  publish_core();
}

void Group::sleep(std::uint32_t doorbell, std::chrono::nanoseconds limit) const {
  futex_wait(node_->own()->segment().header().doorbell, doorbell, limit);
}

void Group::fail(FailureKind kind, std::string_view report) {
  if (!std::exchange(reported_, true)) {
    constexpr std::string_view kCut = "...";
    constexpr std::size_t kMost = sizeof(Mailbox::report) - 1;
    char* text = own().report;
    const bool fits = report.size() <= kMost;
    const std::size_t length = fits ? report.size() : kMost - kCut.size();
    std::memcpy(text, report.data(), length);
    std::strcpy(text + length, fits ? "" : kCut.data());
  }
  const std::uint64_t word = FailureRecord{kind, me_}.pack();
  for (const Member each : members()) {
    std::uint64_t none = 0;
    mailbox(each).failure.compare_exchange_strong(none, word, std::memory_order_acq_rel);
  }
  for (const auto& member : members_) member->wake();
}

std::string Group::report_of(Member reporter) const {
  const char* text = mailbox(reporter).report;
  return std::string(text, strnlen(text, sizeof(Mailbox::report)));
}

std::string Group::describe(Member member) const {
  const pid_t pid = members_[member.at()]->pid();
  return "rank " + std::to_string(rank_of(member)) +
         (pid ? " (pid " + std::to_string(pid) + ")" : "");
}

int Group::read(Member member, void* to, std::uint64_t from, std::size_t bytes) const {
  const Peer& peer = *members_[member.at()];
  if (!is_copied_by_bytes(to, from)) return peer.read(to, from, bytes);
  constexpr std::size_t kPiece = std::size_t{128} << 10;  // stays in the second-level cache
  thread_local const std::unique_ptr<std::byte[]> staging(new (std::nothrow)
                                                              std::byte[kPiece + kPage]);
  if (staging == nullptr) return peer.read(to, from, bytes);
  // Half a page behind the source, modulo a page.
  const auto begin = reinterpret_cast<std::uintptr_t>(staging.get());
  std::byte* const piece = staging.get() + (from + kPage / 2 - begin) % kPage;
  std::size_t at = 0;
  do {
    const std::size_t length = std::min(kPiece, bytes - at);
    if (const int error = peer.read(piece, from + at, length)) return error;
    copy_bytes(static_cast<std::byte*>(to) + at, piece, length);
    at += length;
  } while (at < bytes);
  return 0;
}

std::optional<Member> Group::member_of(int rank) const {
  const auto found = std::find(world_.local_ranks.begin(), world_.local_ranks.end(), rank);
  if (found == world_.local_ranks.end()) return std::nullopt;
  return Member(static_cast<int>(found - world_.local_ranks.begin()));
}

std::shared_ptr<const void> Group::keep(const Request& request) const {
  // Messages go from and to its arrays and the slots of this host.
  return std::make_shared<const std::pair<std::shared_ptr<const void>, decltype(members_)>>(
      request.keep, members_);
}

void Group::set_mapped(std::shared_ptr<MappedMemory> mapped) {
  const std::lock_guard lock(mapped_mutex_);
  mapped_.swap(mapped);  // the old one may wait for a GPU as it ends: not under the lock
}

void Group::leave() {
  if (left_.exchange(true)) return;
  // If the link still uses a slot, this mailbox must not serve another group.
  const bool let_go = !messenger_ || messenger_->close();
  if (messenger_ && messenger_->close_is_deferred()) defer_close(messenger_);
  std::vector<Mailbox*> mailboxes(mailboxes_.begin(), mailboxes_.begin() + size_);
  std::shared_ptr<MappedMemory> mapped;
  {
    const std::lock_guard lock(mapped_mutex_);
    mapped.swap(mapped_);
  }
  for (const Member each : members()) {
    if (each == me_) continue;
    // Once both bits are set, the mailbox may serve another group.
    if (!mapped) mailbox(each).unmapped.fetch_or(bit(me_), std::memory_order_acq_rel);
    mailbox(each).left.fetch_or(bit(me_), std::memory_order_acq_rel);
    members_[each.at()]->wake();
  }
  if (!let_go) return;
  const std::lock_guard lock(channels_mutex_);
  // Nobody uses members_ any more: no thread drives an operation, and the others check whether it
  // is closed. A group that lives on must not keep the memory of peers that are gone.
  node_->retire({me_, range_, channel_buffers_, channel_buffer_bytes_, std::move(members_),
                 std::move(mailboxes), std::move(mapped)});
  members_.clear();
}

}  // namespace pycollective
