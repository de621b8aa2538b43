#include "engine/operations/point_to_point.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "engine/operations/arrival.h"
#include "engine/shards.h"
#include "engine/watch.h"

namespace pycollective {
namespace {

// Shorter messages are there sooner by way of the buffer.
constexpr std::size_t kLeastSingleCopy = std::size_t{64} << 10;
// After each piece of so many bytes a receiver looks for failures of others.
constexpr std::size_t kMessagePiece = std::size_t{512} << 10;
// A process that dies loses its memory before it has ended. (Out of memory, Linux takes it away.)
constexpr int kLooks = 100;
constexpr std::chrono::milliseconds kBetweenLooks{1};

// A sender's buffer; null if its offset is invalid. A peer may have written anything: read nothing
// beyond its memory.
std::byte* buffer_of(const Group& group, Member sender, const SendingHalf& half) {
  const std::uint64_t offset = half.buffer;
  if (offset == 0 || offset % kPage != 0 || offset > kSegmentBytes - kChannelBuffer) return nullptr;
  return group.segment_of(sender, offset);
}

// Behind the buffer.
Announcement* announcements(std::byte* buffer) {
  return reinterpret_cast<Announcement*>(buffer + 2 * kChannelPart);
}

// A sender's announcements.
class Places {
 public:
  Places(const Group& group, Member sender, const SendingHalf& half)
      : first_(half.first),
        size_(std::min<std::size_t>(half.places.load(std::memory_order_acquire), kAnnouncements)) {
    if (size_ < 2) return;
    std::byte* const buffer = buffer_of(group, sender, half);
    if (buffer == nullptr)
      size_ = 1;
    else
      others_ = announcements(buffer);
  }
  std::size_t size() const { return size_; }
  const Announcement& operator[](std::size_t place) const {
    return place == 0 ? first_ : others_[place - 1];
  }

 private:
  const Announcement& first_;
  const Announcement* others_ = nullptr;
  std::size_t size_;
};

// Copies what lies at `from` in a member's process. Throws CollectiveFailure where it is lost or
// has failed, std::runtime_error where its memory cannot be read.
void copy_from(const Operation& operation, Member member, void* to, std::uint64_t from,
               std::size_t bytes) {
  const Group& group = operation.group();
  const int error = group.read(member, to, from, bytes);
  if (error == 0) return;
  for (int looks = 0; looks < kLooks; ++looks) {
    if (looks > 0) std::this_thread::sleep_for(kBetweenLooks);
    if (error == ESRCH || !group.alive(member)) Watch::throw_lost(operation, member);
    Watch::throw_if_failed(operation);  // then it may have freed its input
  }
  throw std::runtime_error("the memory of " + group.describe(member) +
                           " could not be read: process_vm_readv: " + std::strerror(error) +
                           " (errno " + std::to_string(error) + ")");
}

}  // namespace

PairOperation::PairOperation(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      peer_(*group.member_of(request_.root)),
      bytes_(request_.count * size_of(request_.dtype)),
      total_(std::max<std::uint64_t>((bytes_ + kChannelPart - 1) / kChannelPart, 1)),
      end_(total_) {}

void PairOperation::compare(std::uint64_t their_dtype, std::uint64_t their_count) const {
  if (their_dtype == static_cast<std::uint64_t>(request_.dtype) && their_count == request_.count)
    return;
  Request other = request_;
  other.kind = request_.kind == OpKind::kSend ? OpKind::kRecv : OpKind::kSend;
  other.dtype = static_cast<Dtype>(their_dtype);
  other.count = their_count;
  throw_pair_mismatch(
      request_,
      {group_.world().rank, request_.kind, sequence_, describe(signature_of(task_)),
       group_.describe(peer_), describe(signature_of(Task(other)))},
      signature_of(Task(other)),
      "as message number " + std::to_string(sequence_) + " from one to the other; no data moved");
}

std::size_t PairOperation::bytes_of(std::uint64_t chunk) const {
  return std::min(kChannelPart, bytes_ - (chunk - begin_) * kChannelPart);
}

Send::Send(Group& group, const Task& task, std::uint64_t sequence)
    : PairOperation(group, task, sequence),
      mine_(group.sending_half(group.me(), peer_)),
      theirs_(group.receiving_half(peer_, group.me())),
      local_(group.messages().to(peer_)) {}

// Finds the first free place for its tag.
bool Send::find_place() {
  constexpr std::size_t kOwn = kOwnTags;
  const auto& used = local_.used;
  const bool own = request_.tag < 0;
  if (!own && !local_.order.take_place(sequence_)) return false;
  place_ = own ? static_cast<std::size_t>(-request_.tag) : 0;
  for (; place_ < used.size() && used[place_] != 0; ++place_) {
    if (own) return false;
    if (place_ == 0) place_ = kOwn;
  }
  return place_ < kAnnouncements;
}

bool Send::announce() {
  const std::lock_guard lock(local_.mutex);
  if (!find_place()) {
    local_.waited_for = true;
    return false;
  }
  auto& used = local_.used;
  if (place_ >= used.size()) {
    if (local_.buffer == nullptr) {
      const std::size_t offset = group_.allocate_channel_buffer(kChannelBuffer);
      local_.buffer = group_.segment_of(group_.me(), offset);
      mine_.buffer = offset;
    }
    for (std::size_t i = std::max<std::size_t>(used.size(), 1); i <= place_; ++i)
      new (&own_announcement(i)) Announcement();
    used.resize(place_ + 1, 0);
    mine_.places.store(place_ + 1, std::memory_order_release);
  }
  number_ = used[place_] = ++local_.announced;
  const std::uint64_t chunks = mine_.chunks.load(std::memory_order_relaxed);
  if (bytes_ >= kLeastSingleCopy && is_readable(request_.input, bytes_)) {
    early_ = kSingleCopy | reinterpret_cast<std::uintptr_t>(request_.input);
  } else if (local_.early == 0 && local_.moving == 0 &&
             theirs_.chunks.load(std::memory_order_acquire) == chunks) {
    begin_ = chunks;
    write_chunk(chunks);
    local_.early = number_;
    early_ = chunks;
  }
  Announcement& announced = own_announcement(place_);
  announced.tag = request_.tag;
  announced.dtype = static_cast<std::uint32_t>(request_.dtype);
  announced.count = request_.count;
  announced.chunk = early_;
  group_.publish(announced.number, number_);
  // The receiver may read the first chunk meanwhile. Other sends need the lock to write there.
  if ((early_ & kSingleCopy) == 0 && early_chunks() > 1) {
    write_chunk(early_ + 1);
    group_.publish(mine_.early_end, early_ + 2);
  }
  begin_ = 0;
  return true;
}

Announcement& Send::own_announcement(std::size_t place) {
  if (place == 0) return mine_.first;
  return announcements(local_.buffer)[place - 1];
}

bool Send::granted() {
  if (theirs_.granted.load(std::memory_order_acquire) != number_) return false;
  compare(theirs_.dtype, theirs_.count);
  begin_ = next_ = mine_.chunks.load(std::memory_order_relaxed);
  end_ += begin_;
  moving_ = true;
  if (theirs_.single_copy != 0) count_as_one_chunk();
  const bool first_is_there = bytes_ == 0 || theirs_.single_copy != 0 || early_ == begin_;
  if (!first_is_there || chunks() > early_chunks()) {
    const std::lock_guard lock(local_.mutex);
    local_.moving = number_;
    local_.early = 0;  // this message's, or another one's that is overwritten now
  }
  if (first_is_there) group_.publish(mine_.chunks, next_ += early_chunks());
  return true;
}

void Send::write_chunk(std::uint64_t chunk) {
  copy_bytes(local_.buffer + (chunk & 1) * kChannelPart,
             static_cast<const std::byte*>(request_.input) + (chunk - begin_) * kChannelPart,
             bytes_of(chunk));
}

State Send::advance() {
  if (number_ == 0 && !announce()) return State::kBlocked;
  if (!moving_ && !granted()) return State::kBlocked;
  const std::uint64_t read = theirs_.chunks.load(std::memory_order_acquire);
  if (next_ == end_) {
    if (read < end_) return State::kBlocked;
    finish();
    return State::kDone;
  }
  if (next_ >= read + 2) return State::kBlocked;  // both halves are full
  write_chunk(next_);
  group_.publish(mine_.chunks, ++next_);
  return State::kProgressed;
}

void Send::finish() {
  bool waited_for = false;
  {
    const std::lock_guard lock(local_.mutex);
    local_.used[place_] = 0;
    if (request_.tag >= 0) local_.order.end(request_.tag, sequence_);
    if (local_.early == number_) local_.early = 0;
    if (local_.moving == number_) local_.moving = 0;
    waited_for = std::exchange(local_.waited_for, false);
  }
  if (waited_for) group_.wake_own_threads();
}

bool Send::called_by(Member member) const {
  return member != peer_ || moving_ ||
         (number_ != 0 && theirs_.granted.load(std::memory_order_acquire) == number_);
}

bool Send::finished_by(Member member) const {
  if (member != peer_) return true;
  const std::uint64_t read = theirs_.chunks.load(std::memory_order_acquire);
  if (moving_) return read >= end_;
  return number_ != 0 && theirs_.granted.load(std::memory_order_acquire) == number_ &&
         read >= mine_.chunks.load(std::memory_order_relaxed) +
                     (theirs_.single_copy != 0 ? 1 : chunks());
}

Receive::Receive(Group& group, const Task& task, std::uint64_t sequence)
    : PairOperation(group, task, sequence),
      mine_(group.receiving_half(group.me(), peer_)),
      theirs_(group.sending_half(peer_, group.me())),
      local_(group.messages().from(peer_)) {}

Receive::~Receive() {
  if (moving_) release();
}

bool Receive::grant() {
  if (!group_.messages().may_take(task_, request_.root)) return false;
  const Announcement* found = nullptr;
  std::uint64_t begin = 0;
  {
    const std::lock_guard lock(local_.mutex);
    if (local_.busy) {
      local_.waited_for = true;
      return false;
    }
    begin = mine_.chunks.load(std::memory_order_relaxed);
    // The sender has not seen yet that the last message was read.
    if (theirs_.chunks.load(std::memory_order_acquire) != begin) return false;
    const Places places(group_, peer_, theirs_);
    if (local_.taken.size() < places.size()) local_.taken.resize(places.size(), 0);
    for (std::size_t i = 0; i < places.size() && found == nullptr; ++i) {
      const Announcement& each = places[i];
      const std::uint64_t number = each.number.load(std::memory_order_acquire);
      if (number == local_.taken[i] || each.tag != request_.tag) continue;
      found = &each;
      number_ = local_.taken[i] = number;
      local_.busy = moving_ = true;
    }
  }
  if (found == nullptr) return false;
  begin_ = next_ = begin;
  end_ += begin;
  mine_.dtype = static_cast<std::uint64_t>(request_.dtype);
  mine_.count = request_.count;
  const bool single_copy =
      found->chunk != kNoChunk && (found->chunk & kSingleCopy) != 0 && group_.may_read(peer_);
  mine_.single_copy = single_copy ? 1 : 0;
  const bool agrees =
      found->dtype == static_cast<std::uint32_t>(request_.dtype) && found->count == request_.count;
  const bool first_is_there = bytes_ == 0 || found->chunk == begin_;
  if (agrees && first_is_there && chunks() == 1) {
    // One published flag tells both the grant and the read.
    mine_.granted.store(number_, std::memory_order_release);
    read_chunk();
    return true;
  }
  group_.publish(mine_.granted, number_);
  compare(found->dtype, found->count);
  if (single_copy) {
    source_ = found->chunk & ~kSingleCopy;
    count_as_one_chunk();
    copy_from_sender();
    return true;
  }
  early_ = first_is_there;
  if (first_is_there) read_chunk();
  return true;
}

void Receive::read_chunk() {
  const std::byte* const buffer = buffer_of(group_, peer_, theirs_);
  if (bytes_ != 0 && buffer == nullptr)
    throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                             group_.describe(peer_) + " sent a message from outside its memory"});
  if (bytes_ != 0)
    copy_bytes(static_cast<std::byte*>(request_.output) + (next_ - begin_) * kChannelPart,
               buffer + (next_ & 1) * kChannelPart, bytes_of(next_));
  group_.publish(mine_.chunks, ++next_);
}

void Receive::copy_from_sender() {
  const std::size_t bytes = std::min(bytes_ - copied_, kMessagePiece);
  copy_from(*this, peer_, static_cast<std::byte*>(request_.output) + copied_, source_ + copied_,
            bytes);
  copied_ += bytes;
  if (copied_ < bytes_) return;
  group_.publish(mine_.chunks, ++next_);
  // The sender tells of a failure before its call ends, and its caller may change the message.
  Watch::throw_if_failed(*this);
}

State Receive::advance() {
  if (!moving_) {
    if (!grant()) return State::kBlocked;
  } else if (source_ != 0) {
    copy_from_sender();
  } else if (theirs_.chunks.load(std::memory_order_acquire) <= next_ &&
             !(early_ && theirs_.early_end.load(std::memory_order_acquire) > next_)) {
    return State::kBlocked;
  } else {
    read_chunk();
  }
  if (next_ != end_) return State::kProgressed;
  release();
  return State::kDone;
}

void Receive::release() {
  moving_ = false;
  bool waited_for = false;
  {
    const std::lock_guard lock(local_.mutex);
    local_.busy = false;
    waited_for = std::exchange(local_.waited_for, false);
  }
  if (waited_for) group_.wake_own_threads();
}

bool Receive::called_by(Member member) const {
  return member != peer_ || has_begun() || is_there(group_, peer_, request_.tag);
}

bool Receive::finished_by(Member member) const {
  if (member != peer_) return true;
  if (has_begun() && next_ == end_) return true;
  return has_begun() && source_ == 0 && theirs_.chunks.load(std::memory_order_acquire) >= end_;
}

bool Receive::is_there(Group& group, Member source, int tag) {
  SendingHalf& half = group.sending_half(source, group.me());
  Incoming& local = group.messages().from(source);
  const std::lock_guard lock(local.mutex);
  if (local.busy) {
    local.waited_for = true;
    return false;
  }
  const Places places(group, source, half);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Announcement& each = places[i];
    const std::uint64_t number = each.number.load(std::memory_order_acquire);
    if (number != (i < local.taken.size() ? local.taken[i] : 0) && each.tag == tag) return true;
  }
  return false;
}

ReceiveAny::ReceiveAny(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence), named_(*task.request), named_task_(named_) {}

ReceiveAny::~ReceiveAny() { stop_awaiting(); }

void ReceiveAny::stop_awaiting() {
  if (std::exchange(awaits_, false)) group_.messenger()->await_anyone(false);
}

void ReceiveAny::start() {
  if (group_.messenger() == nullptr) return;
  group_.messages().internode().hear_anyone(group_.messenger()->ranks());
  group_.messenger()->await_anyone(true);
  awaits_ = true;
}

std::optional<State> ReceiveAny::try_rank(int rank, bool& kept) {
  if (rank == group_.world().rank || !group_.messages().may_take(task_, rank)) return std::nullopt;
  const std::optional<Member> member = group_.member_of(rank);
  named_.root = rank;
  if (!member) {
    if (!group_.messages().internode().expect_if_there(rank, request_.tag, kept))
      return std::nullopt;
    found_ = &receive_.emplace<InternodePair>(group_, named_task_, sequence_, true);
    found_->start();
    return found_->advance();
  }
  if (!Receive::is_there(group_, *member, request_.tag)) return std::nullopt;
  Receive& receive = receive_.emplace<Receive>(group_, named_task_, sequence_);
  const State state = receive.advance();
  if (receive.has_begun()) {
    found_ = &receive;
    return state;
  }
  receive_.emplace<std::monostate>();  // another thread's receive has taken it
  return std::nullopt;
}

std::optional<State> ReceiveAny::find(bool& kept) {
  if (group_.messenger() != nullptr) group_.messenger()->poll();
  // From the rank after the last one served, so that none waits for ever.
  const int ranks = group_.world().size;
  const int first = group_.messages().next_source();
  for (int i = 0; i < ranks; ++i)
    if (const auto state = try_rank((first + i) % ranks, kept)) return state;
  return std::nullopt;
}

State ReceiveAny::advance() {
  State state = State::kBlocked;
  bool kept = false;
  if (found_ != nullptr) {
    state = found_->advance();
  } else if (const auto begun = find(kept)) {
    stop_awaiting();
    group_.messages().set_next_source((named_.root + 1) % group_.world().size);
    if (request_.source != nullptr) *request_.source = named_.root;
    state = *begun;
  } else if (group_.messages().closes()) {
    const std::string rank = std::to_string(group_.world().rank);
    throw EndedByClose({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                        "recv number " + std::to_string(sequence_) + " on rank " + rank +
                            ": rank " + rank + " closed its communicator before a message came"});
  } else if (kept) {
    state = State::kProgressed;
  }
  return state;
}

bool ReceiveAny::somebody_is_there() const {
  for (const Member each : group_.members())
    if (each != group_.me() && !group_.has_left(each)) return true;
  return group_.messenger() != nullptr && group_.messenger()->anyone_is_there();
}

void ReceiveAny::compare_calls() const {
  if (found_ != nullptr) return found_->compare_calls();
  if (somebody_is_there()) return;
  throw CollectiveFailure(
      {FailureKind::kPeerFailure, group_.world().rank, request_.kind, sequence_,
       "recv number " + std::to_string(sequence_) + " on rank " +
           std::to_string(group_.world().rank) +
           ": all other ranks closed their communicators, and none has sent it a message"});
}

bool ReceiveAny::finished_by(Member member) const {
  return found_ != nullptr ? found_->finished_by(member) : group_.has_left(member);
}

bool ReceiveAny::called_by(Member member) const {
  return found_ != nullptr && found_->called_by(member);
}

std::string ReceiveAny::internode_absentees() const {
  if (found_ != nullptr) return found_->internode_absentees();
  if (group_.messenger() == nullptr) return {};
  std::string ranks;
  for (const int rank : group_.messenger()->ranks())
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

std::set<int> ReceiveAny::internode_unfinished() const {
  return found_ != nullptr ? found_->internode_unfinished() : std::set<int>();
}

}  // namespace pycollective
