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

void Scheduled::post(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = bytes_of(message, chunk);
  std::byte* memory = message.pieces == 1 ? at(piece(message, 0), chunk)
                                          : far_->staging(chunk % slots_, number, bytes);
  far_->post(chunk % slots_, number, memory, bytes);
}

bool Scheduled::receive(std::size_t chunk, std::int32_t number) {
  if (!far_->arrived(chunk % slots_, number)) return false;
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  if (message.pieces == 1) return true;
  const std::byte* from = far_->staging(chunk % slots_, number, 0);
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& to = piece(message, p);
    const std::size_t bytes = bytes_of(to, chunk);
    copy_bytes(at(to, chunk), from, bytes);
    from += bytes;
  }
  return true;
}

void Scheduled::send(std::size_t chunk, std::int32_t number) {
  const Message& message = program_.messages[static_cast<std::size_t>(number)];
  const std::size_t bytes = bytes_of(message, chunk);
  if (message.pieces == 1)
    return far_->send(chunk % slots_, number, at(piece(message, 0), chunk), bytes);
  std::byte* memory = far_->staging(chunk % slots_, number, bytes);
  std::byte* to = memory;
  for (std::int32_t p = 0; p < message.pieces; ++p) {
    const Ref& from = piece(message, p);
    const std::size_t each = bytes_of(from, chunk);
    copy_bytes(to, at(from, chunk), each);
    to += each;
  }
  far_->send(chunk % slots_, number, memory, bytes);
}

}  // namespace pycollective
