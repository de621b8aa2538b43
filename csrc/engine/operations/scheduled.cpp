#include "engine/operations/scheduled.h"

#include <algorithm>
#include <cstring>

#include "engine/shards.h"

namespace pycollective {
namespace {

// Parts are a multiple of so many elements: whole cache lines of any type, and whole vector steps.
constexpr std::size_t kPartUnit = 64;
static_assert(kPartUnit % kNodeRoom == 0);
// A larger slot leaves the cache before it is read; with smaller parts, flags cost more.
constexpr std::size_t kLargestSlot = std::size_t{256} << 10;
constexpr std::size_t kLargestPart = std::size_t{128} << 10;
// Between hosts a message costs more than a cache miss.
constexpr std::size_t kLargestInternodeSlot = std::size_t{4} << 20;
constexpr std::size_t kLargestInternodePart = std::size_t{1} << 20;
constexpr std::size_t kSmallestInternodePart = std::size_t{512} << 10;
// Staging memory for packed messages to and from every rank.
constexpr std::size_t kMostStaged = std::size_t{256} << 20;
constexpr std::size_t kSmallestPart = std::size_t{8} << 10;
// A message is cut into at least this many chunks, so that moving and combining overlap.
constexpr std::size_t kFewestChunks = 4;
constexpr int kEventBits = 20;

using PieceLength = std::uint32_t;  // bytes; a part is a few MiB at most
// Lengths are copied as they lie in memory, and wire.md states that byte order; the codecs
// rely on it, too (kernels/pack/block.inl).
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

}  // namespace

Scheduled::Slot Scheduled::slot_of(const Group& group, const Task& task) {
  const Request& request = *task.request;
  const Program& program = *task.program;
  const auto nodes = static_cast<std::size_t>(program.nodes);
  const auto items = static_cast<std::size_t>(program.items);
  return {nodes * node_size(request.dtype, request.reduce_op) + items * size_of(request.dtype),
          group.slots_bytes()};
}

bool Scheduled::fits(const Group& group, const Task& task) {
  const Slot slot = slot_of(group, task);
  return slot.bytes_of_an_element * kPartUnit <= slot.available;
}

void Scheduled::require_fit(const Group& group, const Task& task) {
  const Request& request = *task.request;
  const Program& program = *task.program;
  const World& world = group.world();
  if (!program.serves(request) || program.rank != world.rank || program.ranks != world.size ||
      program.members != group.size())
    throw CollectiveFailure({FailureKind::kConfiguration, world.rank, request.kind, 0,
                             std::string(name_of(request.kind)) + ": the program of '" +
                                 program.algorithm + "' is another call's or communicator's"});
  if (fits(group, task)) return;
  const Slot slot = slot_of(group, task);
  throw CollectiveFailure(
      {FailureKind::kConfiguration, group.world().rank, request.kind, 0,
       std::string(name_of(request.kind)) + ": algorithm '" + program.algorithm + "' needs " +
           std::to_string(slot.bytes_of_an_element * kPartUnit) +
           " bytes of shared memory a rank, and this communicator has " +
           std::to_string(slot.available) +
           "; the first communicators of a process have most. Use algorithm='auto'"});
}

Scheduled::Scheduled(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      arrival_(group, task, sequence),
      program_(*task.program),
      output_(static_cast<std::byte*>(output_of(request_, group.world().rank))),
      shards_(shards_of(request_, program_)),
      executor_(group, request_),
      element_(size_of(request_.dtype)),
      node_(node_size(request_.dtype, request_.reduce_op)) {
  // Decided for the communicator, not for this rank: all ranks must cut the buffer alike.
  const bool internode = program_.members != program_.ranks;
  if (internode) internode_.emplace(group, task, sequence);
  if (internode && task.wire == Wire::kExact)
    packed_items_ = find_packing(request_.dtype, active_simd_level());
  packs_ = packed_items_.pack != nullptr;
  if (packs_) {
    packed_nodes_ =
        node_ == element_ ? packed_items_ : find_packing(Dtype::kFloat32, active_simd_level());
  }
  const Slot slot = slot_of(group, task);
  const std::size_t bytes = std::max(slot.bytes_of_an_element, element_);
  while (slots_ > 1 && bytes * kPartUnit * slots_ > slot.available) --slots_;
  const std::size_t most_that_fit =
      std::min(slot.available / slots_, internode ? kLargestInternodeSlot : kLargestSlot) / bytes;
  const std::size_t wanted =
      std::clamp(shards_.longest() * element_ / (internode ? 2 : kFewestChunks),
                 internode ? kSmallestInternodePart : kSmallestPart,
                 internode ? kLargestInternodePart : kLargestPart) /
      element_;
  std::size_t most = std::min(most_that_fit, wanted);
  if (packs_)  // each message is staged
    most =
        std::min(most, kMostStaged / (slots_ * node_ * static_cast<std::size_t>(program_.ranks)));
  part_ = std::max(most / kPartUnit * kPartUnit, kPartUnit);
  chunks_ = (shards_.longest() + part_ - 1) / part_;
  // A barrier's messages, and those of an empty buffer, are awaited all the same: ranks that
  // exchange no data learn of a mismatch from those that do.
  if (internode) chunks_ = std::max<std::size_t>(chunks_, 1);
}

void Scheduled::start() {
  arrival_.arrive();
  if (internode_)
    internode_->start(chunks_ != 0, [this](std::int32_t message) {
      return bytes_of(program_.messages[static_cast<std::size_t>(message)], 0);
    });
}

std::string Scheduled::internode_absentees() const {
  return internode_ ? internode_->absentees() : std::string();
}

std::set<int> Scheduled::internode_unfinished() const {
  return internode_ ? internode_->unfinished() : std::set<int>();
}

bool Scheduled::finished_by(Member member) const {
  // Also before this rank has begun: others may have arrived and finished since it looked.
  const std::uint64_t base = begun_ ? base_ : executor_.chunks_done();
  return arrival_.arrived(member) && executor_.has_done(member, base + chunks_);
}

std::uint64_t Scheduled::mark(std::size_t chunk, std::uint64_t events) const {
  return (base_ + chunk) << kEventBits | events;
}

void Scheduled::begin() {
  base_ = executor_.chunks_done();
  begun_ = true;
}

State Scheduled::advance() {
  if (internode_) internode_->poll();
  if (!begun_) {
    if (!arrival_.complete()) return State::kBlocked;
    begin();
  }
  bool progressed = false;
  while (started_ < chunks_ && started_ - oldest_ < slots_ && slot_is_free(started_)) {
    runs_[started_ % slots_] = {started_, 0, 0};
    ++started_;
    progressed = true;
  }
  for (std::size_t chunk = oldest_; chunk < started_; ++chunk)
    progressed |= go_on(runs_[chunk % slots_]);
  while (oldest_ < started_ && runs_[oldest_ % slots_].next == program_.instructions.size() &&
         (!internode_ || internode_->all_sends_done(oldest_ % slots_))) {
    ++oldest_;
    executor_.publish_done(base_ + oldest_);
  }
  const bool done = oldest_ == chunks_ && (!internode_ || internode_->all_have_called());
  if (done) return State::kDone;
  return progressed ? State::kProgressed : State::kBlocked;
}

bool Scheduled::slot_is_free(std::size_t chunk) const {
  if (chunk < slots_) return true;
  for (const Member reader : program_.readers)
    if (!executor_.has_done(reader, base_ + chunk - slots_ + 1)) return false;
  return true;
}

// Returns whether it made progress.
bool Scheduled::go_on(Run& run) {
  const std::size_t slot = run.chunk % slots_;
  const std::size_t from = run.next;
  for (; run.next < program_.instructions.size(); ++run.next) {
    const Instruction& each = program_.instructions[run.next];
    switch (each.kind) {
      case Instruction::Kind::kWait:
        if (!executor_.has_published(Member(each.a), slot,
                                     mark(run.chunk, static_cast<std::uint64_t>(each.b))))
          return run.next != from;
        break;
      case Instruction::Kind::kCopy:
        copy(run.chunk, program_.refs[static_cast<std::size_t>(each.a)],
             program_.refs[static_cast<std::size_t>(each.b)]);
        break;
      case Instruction::Kind::kCombine:
        combine(run.chunk, each);
        break;
      case Instruction::Kind::kPublish:
        run.events += static_cast<std::uint64_t>(each.a);
        executor_.publish(slot, mark(run.chunk, run.events));
        break;
      case Instruction::Kind::kPost:
        post(run.chunk, each.a);
        break;
      case Instruction::Kind::kReceive:
        if (!receive(run.chunk, each.a)) return run.next != from;
        break;
      case Instruction::Kind::kSend:
        send(run.chunk, each.a);
        break;
      case Instruction::Kind::kSettle:
        if (!internode_->sends_done(slot, static_cast<std::size_t>(each.a)))
          return run.next != from;
        break;
    }
  }
  return run.next != from;
}

Range Scheduled::part_of(std::int32_t shard, std::size_t chunk) const {
  // All blocks of pairs have the same length.
  return shards_.part(program_.pieces == Pieces::kPairs ? 0 : shard, chunk, part_);
}

// Where a shard begins in the caller's input or output, in elements.
std::size_t Scheduled::begin_in(Place place, std::int32_t shard) const {
  const int begin = begin_of(program_, place, shard);
  return begin == kBeginsAtZero ? 0 : shards_.begin(begin);
}

std::byte* Scheduled::at(const Ref& ref, std::size_t chunk) const {
  const auto index = static_cast<std::size_t>(ref.index);
  switch (ref.place) {
    case Place::kInput: {
      const std::size_t element = program_.is_node(ref) ? node_ : element_;
      const void* input = request_.nodes ? request_.nodes->rows[index] : request_.input;
      return const_cast<std::byte*>(static_cast<const std::byte*>(input)) +
             (begin_in(ref.place, ref.shard) + chunk * part_) * element;
    }
    case Place::kOutput:
      return output_ + (begin_in(ref.place, ref.shard) + chunk * part_) * element_;
    default:
      break;
  }
  const auto nodes = static_cast<std::size_t>(program_.nodes);
  const std::size_t slot_bytes =
      part_ * (nodes * node_ + static_cast<std::size_t>(program_.items) * element_);
  std::byte* slot = executor_.slots(ref.member) + (chunk % slots_) * slot_bytes;
  return slot + (ref.place == Place::kNode ? index * part_ * node_
                                           : part_ * (nodes * node_ + index * element_));
}

void Scheduled::copy(std::size_t chunk, const Ref& from, const Ref& to) const {
  const std::size_t size = program_.is_node(from) ? node_ : element_;
  executor_.copy(at(to, chunk), at(from, chunk), part_of(from.shard, chunk).length * size);
}

void Scheduled::combine(std::size_t chunk, const Instruction& instruction) {
  const CombineStep& step = program_.combines[static_cast<std::size_t>(instruction.a)];
  const Ref& out = program_.refs[static_cast<std::size_t>(instruction.b)];
  const std::size_t count = part_of(out.shard, chunk).length;
  if (count == 0) return;
  std::byte* copy_to = instruction.c == -1
                           ? nullptr
                           : at(program_.refs[static_cast<std::size_t>(instruction.c)], chunk);
  Term few_terms[kMaxMembers];
  Term* terms = few_terms;
  if (step.terms > kMaxMembers) {
    many_terms_.resize(std::max(many_terms_.size(), static_cast<std::size_t>(step.terms)));
    terms = many_terms_.data();
  }
  bool only_leaves = step.finish && step.terms == program_.ranks && program_.leaves == 0;
  for (int t = 0; t < step.terms; ++t) {
    const std::int32_t index = program_.terms[static_cast<std::size_t>(step.first_term + t)];
    const Ref& ref = program_.refs[static_cast<std::size_t>(index)];
    terms[t] = {at(ref, chunk), program_.is_node(ref)};
    only_leaves = only_leaves && !terms[t].is_node;
  }
  const double divisor = divisor_of(request_, program_.ranks);
  const Combination what = {program_.recipes.data() + step.first_recipe, step.recipe_length,
                            step.terms, divisor, step.finish};
  executor_.combine(what, terms, only_leaves, at(out, chunk), copy_to, count);
}

// Messages to and from other hosts.

std::size_t Scheduled::bytes_of(const Ref& ref, std::size_t chunk) const {
  return part_of(ref.shard, chunk).length * (program_.is_node(ref) ? node_ : element_);
}

std::size_t Scheduled::bytes_of(const Message& message, std::size_t chunk) const {
  std::size_t bytes = 0;
  for (std::int32_t p = 0; p < message.pieces; ++p) bytes += bytes_of(piece(message, p), chunk);
  return bytes;
}

const Ref& Scheduled::piece(const Message& message, std::int32_t number) const {
  const auto index = static_cast<std::size_t>(message.first_piece + number);
  return program_.refs[static_cast<std::size_t>(program_.message_pieces[index])];
}

void Scheduled::gather(const Message& message, std::size_t chunk, std::byte* to) const {
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& from = piece(message, p);
    const std::size_t bytes = bytes_of(from, chunk);
    executor_.copy(to, at(from, chunk), bytes);
    to += bytes;
  }
}

void Scheduled::scatter(const Message& message, std::size_t chunk, const std::byte* from) const {
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& to = piece(message, p);
    const std::size_t bytes = bytes_of(to, chunk);
    executor_.copy(at(to, chunk), from, bytes);
    from += bytes;
  }
}

std::size_t Scheduled::capacity_of(const Message& message, std::size_t chunk) const {
  const std::size_t raw = bytes_of(message, chunk);
  return packs_ ? raw + static_cast<std::size_t>(message.pieces) * sizeof(PieceLength) : raw;
}

std::size_t Scheduled::pack(const Message& message, std::size_t chunk, std::byte* to) const {
  std::byte* const begin = to;
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& from = piece(message, p);
    std::byte* const body = to + sizeof(PieceLength);
    const std::size_t packed =
        packing_of(from).pack(at(from, chunk), part_of(from.shard, chunk).length, body);
    const auto length = static_cast<PieceLength>(packed);
    std::memcpy(to, &length, sizeof(length));
    to = body + packed;
  }
  return static_cast<std::size_t>(to - begin);
}

void Scheduled::unpack(const Message& message, std::size_t chunk, const std::byte* from) const {
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& to = piece(message, p);
    PieceLength length = 0;
    std::memcpy(&length, from, sizeof(length));
    from += sizeof(length);
    // A piece that is no longer than its elements lies within the message's capacity.
    if (length > bytes_of(to, chunk) ||
        !packing_of(to).unpack(from, length, at(to, chunk), part_of(to.shard, chunk).length))
      throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                               "rank " + std::to_string(group_.world().rank) +
                                   " received from rank " + std::to_string(message.rank) +
                                   " a packed message that no rank of this library sends"});
    from += length;
  }
}

void Scheduled::post(std::size_t chunk, std::int32_t number) {
  if (internode_->is_eager(chunk == 0, number)) return;
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = capacity_of(message, chunk);
  std::byte* memory = message.pieces == 1 && !packs_
                          ? at(piece(message, 0), chunk)
                          : internode_->staging(chunk % slots_, number, bytes);
  internode_->post(chunk % slots_, number, memory, bytes);
}

bool Scheduled::receive(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  if (internode_->is_eager(chunk == 0, number)) {
    const std::byte* data = internode_->eager_payload(number, bytes_of(message, chunk));
    if (data == nullptr) return false;
    scatter(message, chunk, data);
    return true;
  }
  if (!internode_->arrived(chunk % slots_, number)) return false;
  if (packs_)
    unpack(message, chunk, internode_->staging(chunk % slots_, number, 0));
  else if (message.pieces != 1)
    scatter(message, chunk, internode_->staging(chunk % slots_, number, 0));
  return true;
}

void Scheduled::send(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = bytes_of(message, chunk);
  const std::size_t slot = chunk % slots_;
  if (internode_->is_eager(chunk == 0, number)) {
    MessageBuffer call = internode_->make_call(bytes);
    gather(message, chunk, Messenger::data_of(call));
    internode_->send_call(number, std::move(call));
    return internode_->count_sent(slot);
  }
  if (packs_) {
    std::byte* memory = internode_->staging(slot, number, capacity_of(message, chunk));
    return internode_->send(slot, number, memory, pack(message, chunk, memory), bytes);
  }
  if (message.pieces == 1)
    return internode_->send(slot, number, at(piece(message, 0), chunk), bytes, bytes);
  std::byte* memory = internode_->staging(slot, number, bytes);
  gather(message, chunk, memory);
  internode_->send(slot, number, memory, bytes, bytes);
}

}  // namespace pycollective
