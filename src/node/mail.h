#pragma once

#include <cstdint>

#include "node/futex.h"
#include "node/types.h"

namespace paceline::node {

inline constexpr std::size_t kCacheLine = 64;

// The shared memory of messages between two ranks; see Mailbox, which alone reads and writes it.

// Announces a message.
struct Letter {
  std::uint64_t parcel = 0;  // offset of its Parcel in the sender's arena
  std::uint64_t data = 0;    // of the data, if they lie in the sender's arena as a whole; see Call
  std::uint64_t count = 0;
  std::int32_t tag = 0;
  DataType type = DataType::byte;
};

// The letters from one rank to another that the receiver has not taken yet, in a ring.
struct Outbox {
  static constexpr std::uint32_t kLetters = 16;

  alignas(kCacheLine) Word written;  // by the sender: how many so far
  alignas(kCacheLine) Word taken;    // by the receiver
  Letter letters[kLetters];
};

// Goes with one message; its buffer, if it needs one, follows it.
struct alignas(kCacheLine) Parcel {
  Word wanted;     // by the receiver: 1 once it has a buffer to copy to
  Word filled;     // by the sender: chunks that it has put into the buffer
  Word withdrawn;  // by the sender: 1 once what lies there is no longer the message
  alignas(kCacheLine) Word drained;  // by the receiver: chunks that it has copied out
};

}  // namespace paceline::node
