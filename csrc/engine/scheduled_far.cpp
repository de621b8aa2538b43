// Scheduled's messages to and from other hosts.
#include "engine/copy.h"
#include "engine/scheduled.h"

namespace pycollective {

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

void Scheduled::pack(const Message& message, std::size_t chunk, std::byte* to) const {
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& from = piece(message, p);
    const std::size_t bytes = bytes_of(from, chunk);
    copy_bytes(to, at(from, chunk), bytes);
    to += bytes;
  }
}

void Scheduled::unpack(const Message& message, std::size_t chunk, const std::byte* from) const {
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& to = piece(message, p);
    const std::size_t bytes = bytes_of(to, chunk);
    copy_bytes(at(to, chunk), from, bytes);
    from += bytes;
  }
}

void Scheduled::post(std::size_t chunk, std::int32_t number) {
  if (far_->rides(chunk == 0, number)) return;
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = bytes_of(message, chunk);
  std::byte* memory = message.pieces == 1 ? at(piece(message, 0), chunk)
                                          : far_->staging(chunk % slots_, number, bytes);
  far_->post(chunk % slots_, number, memory, bytes);
}

bool Scheduled::receive(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  if (far_->rides(chunk == 0, number)) {
    const std::byte* data = far_->rider(number, bytes_of(message, chunk));
    if (data == nullptr) return false;
    unpack(message, chunk, data);
    return true;
  }
  if (!far_->arrived(chunk % slots_, number)) return false;
  if (message.pieces != 1) unpack(message, chunk, far_->staging(chunk % slots_, number, 0));
  return true;
}

void Scheduled::send(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = bytes_of(message, chunk);
  const std::size_t slot = chunk % slots_;
  if (far_->rides(chunk == 0, number)) {
    Parcel call = far_->make_rider(bytes);
    pack(message, chunk, Messenger::data_of(call));
    far_->send_rider(number, std::move(call));
    return far_->count_sent(slot);
  }
  if (message.pieces == 1) return far_->send(slot, number, at(piece(message, 0), chunk), bytes);
  std::byte* memory = far_->staging(slot, number, bytes);
  pack(message, chunk, memory);
  far_->send(slot, number, memory, bytes);
}

}  // namespace pycollective
