// Scheduled's messages to and from other hosts.
#include <cstring>

#include "engine/operations/scheduled.h"
#include "engine/plans/wire_trial.h"

namespace pycollective {
namespace {

using PieceLength = std::uint32_t;  // bytes; a part is a few MiB at most
// Lengths are copied as they lie in memory, and docs/wire.md says in which order that is; so do the
// codecs (kernels/pack/block.inl).
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

}  // namespace

std::size_t Scheduled::bytes_of(const Ref& ref, std::size_t chunk) const {
  return part_of(ref.shard, chunk).length * (ref.place == Place::kNode ? node_ : element_);
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
    // What is no longer than its elements lies within the message's capacity.
    if (length > bytes_of(to, chunk) ||
        !packing_of(to).unpack(from, length, at(to, chunk), part_of(to.shard, chunk).length))
      throw CollectiveFailure({FailureKind::kAborted, group_.world().rank, request_.kind, sequence_,
                               "rank " + std::to_string(group_.world().rank) +
                                   " received from rank " + std::to_string(message.rank) +
                                   " a packed message that no rank of this library sends"});
    from += length;
  }
}

void Scheduled::note_time(bool done) {
  const auto now = std::chrono::steady_clock::now();
  if (!all_called_ && far_->all_have_called()) all_called_ = now;
  if (done)
    request_.trial->took(request_.call_of_trial,
                         std::chrono::duration<double>(now - *all_called_).count());
}

void Scheduled::post(std::size_t chunk, std::int32_t number) {
  if (far_->rides(chunk == 0, number)) return;
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = capacity_of(message, chunk);
  std::byte* memory = message.pieces == 1 && !packs_ ? at(piece(message, 0), chunk)
                                                     : far_->staging(chunk % slots_, number, bytes);
  far_->post(chunk % slots_, number, memory, bytes);
}

bool Scheduled::receive(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  if (far_->rides(chunk == 0, number)) {
    const std::byte* data = far_->rider(number, bytes_of(message, chunk));
    if (data == nullptr) return false;
    scatter(message, chunk, data);
    return true;
  }
  if (!far_->arrived(chunk % slots_, number)) return false;
  if (packs_)
    unpack(message, chunk, far_->staging(chunk % slots_, number, 0));
  else if (message.pieces != 1)
    scatter(message, chunk, far_->staging(chunk % slots_, number, 0));
  return true;
}

void Scheduled::send(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = bytes_of(message, chunk);
  const std::size_t slot = chunk % slots_;
  if (far_->rides(chunk == 0, number)) {
    Parcel call = far_->make_rider(bytes);
    gather(message, chunk, Messenger::data_of(call));
    far_->send_rider(number, std::move(call));
    return far_->count_sent(slot);
  }
  if (packs_) {
    std::byte* memory = far_->staging(slot, number, capacity_of(message, chunk));
    return far_->send(slot, number, memory, pack(message, chunk, memory), bytes);
  }
  if (message.pieces == 1)
    return far_->send(slot, number, at(piece(message, 0), chunk), bytes, bytes);
  std::byte* memory = far_->staging(slot, number, bytes);
  gather(message, chunk, memory);
  far_->send(slot, number, memory, bytes, bytes);
}

}  // namespace pycollective
