#pragma once

#include <cstdint>

#include "shm/collectives/fingerprint.h"
#include "shm/kernels/types.h"
#include "shm/sync/cache_line.h"
#include "shm/sync/futex.h"

namespace paceline::shm {

// The shared memory of messages between two ranks; see Mailbox, which alone reads and writes it.

// Announces a message.
struct MessageHeader {
  std::uint64_t payload = 0;  // offset of its Payload in the sender's arena
  // Offset of the data, if the sender's arena holds all of it; see CollectiveFingerprint.
  std::uint64_t data = 0;
  std::uint64_t count = 0;
  std::int32_t tag = 0;
  DataType type = DataType::byte;

  bool is_shared() const { return data != CollectiveFingerprint::kNotShared; }
};

// A ring of the headers from one rank to another that the receiver has not taken yet.
struct SendRing {
  static constexpr std::uint32_t kHeaders = 16;

  alignas(kCacheLine) Word written;  // by the sender: how many so far
  alignas(kCacheLine) Word taken;    // by the receiver
  MessageHeader headers[kHeaders];
};

// Goes with one message; its buffer, if it needs one, follows it.
struct alignas(kCacheLine) Payload {
  Word wanted;                       // by the receiver: 1 once it has a buffer to copy to
  Word filled;                       // by the sender: chunks that it has put into the buffer
  Word withdrawn;                    // by the sender: 1 once the memory no longer holds the message
  alignas(kCacheLine) Word drained;  // by the receiver: chunks that it has copied out
};

}  // namespace paceline::shm
