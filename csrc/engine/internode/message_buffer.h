// The library's own messages between hosts. Each has a header with its length: a transport need not
// tell how long a message was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/operations/call_signature.h"

namespace pycollective {

enum class MessageKind : std::uint8_t { kCall, kFailure, kGoodbye, kReminder };

struct MessageHeader {
  std::uint64_t communicator;
  std::uint32_t magic;
  std::uint32_t bytes;  // that follow
  std::int32_t sender;  // rank
  MessageKind kind;
  std::uint8_t failure;  // FailureKind, of a failure
  std::uint16_t unused;
};
static_assert(sizeof(MessageHeader) == 24);

// The memory of one such message. The link uses it while the message is under way.
class MessageBuffer {
 public:
  static constexpr std::uint32_t kMagic = 0x70634d32;  // last digit: version of the format

  MessageBuffer() = default;
  explicit MessageBuffer(std::size_t body_bytes)
      : body_bytes_(body_bytes), memory_(new std::byte[sizeof(MessageHeader) + body_bytes]) {}

  explicit operator bool() const { return memory_ != nullptr; }
  std::size_t body_bytes() const { return body_bytes_; }
  MessageHeader& header() { return *reinterpret_cast<MessageHeader*>(memory_.get()); }
  const MessageHeader& header() const { return *reinterpret_cast<MessageHeader*>(memory_.get()); }
  std::byte* body() const { return memory_.get() + sizeof(MessageHeader); }

  std::byte* data() const { return memory_.get(); }
  std::size_t capacity() const { return sizeof(MessageHeader) + body_bytes_; }
  std::size_t length() const { return sizeof(MessageHeader) + header().bytes; }
  // Whether a whole message has arrived.
  bool is_sound() const {
    const MessageHeader& head = header();
    return head.magic == kMagic && head.bytes <= body_bytes_ && head.kind <= MessageKind::kReminder;
  }

 private:
  std::size_t body_bytes_ = 0;
  std::unique_ptr<std::byte[]> memory_;
};

// What a rank has called, and under which number: the body of a call.
struct NumberedCall {
  std::uint64_t sequence = 0;
  CallSignature called;

  bool agrees(const NumberedCall& other) const {
    return sequence == other.sequence && agree(called, other.called);
  }
  std::string describe() const {
    return pycollective::describe(called) + " as number " + std::to_string(sequence);
  }
};

}  // namespace pycollective
