#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>

#include "base/deadline.h"
#include "shm/kernels/types.h"
#include "shm/late_ranks.h"
#include "shm/p2p/message_header.h"
#include "shm/region.h"
#include "shm/wait_context.h"

namespace paceline::shm {

struct P2PMessage {
  static constexpr int kAnyRank = -1;

  void* data;  // only read if it is sent
  std::size_t count;
  DataType type;
  int peer;
  int tag;
  std::chrono::milliseconds timeout;

  std::size_t bytes() const { return count * element_size(type); }
};

// A message that this rank sends or receives, and how far it is.
struct P2PRequest {
  P2PMessage message;
  std::function<void(std::exception_ptr error, int peer)> done;
  base::Deadline deadline;
  bool sending;
  MessageHeader header{};
  Payload* payload = nullptr;   // once announced, or matched
  std::byte* source = nullptr;  // of a receive: the data or the buffer
  std::size_t moved = 0;        // chunks

  bool is_complete() const;
};

// What one thread copies before the other threads of its process get a turn, and how many such
// chunks may be under way.
inline constexpr std::size_t kChunk = std::size_t{256} << 10;
inline constexpr std::size_t kBuffers = 4;

// An empty message is one empty chunk.
inline std::size_t chunks_of(std::size_t bytes) {
  return std::max<std::size_t>((bytes + kChunk - 1) / kChunk, 1);
}
inline std::size_t size_of_chunk(std::size_t chunk, std::size_t bytes) {
  return std::min(bytes - chunk * kChunk, kChunk);
}
// The size of the buffer behind a Payload, for `bytes` outside of the sender's arena.
inline std::size_t buffer_bytes(std::size_t bytes) {
  return std::min(bytes, kBuffers * kChunk);
}

inline bool P2PRequest::is_complete() const {
  return moved == chunks_of(message.bytes());
}

inline OpContext context_of(const P2PRequest& request) {
  return {request.sending ? "send" : "recv", 0};
}
// "send of 10 float32 to rank 1 with tag 0 in group world". `ranks`: whose ranks the message names.
std::string describe(const P2PMessage& message, bool sending, const GlobalRanks& ranks,
                     const Region& region);
inline std::string describe(const P2PRequest& request, const Region& region) {
  return describe(request.message, request.sending, region.global_ranks(), region);
}
// A message of `rank` that did not complete in time.
Failure late_message(const P2PMessage& message, bool sending, int rank, const GlobalRanks& ranks,
                     const Region& region);

// Of a thread that waits for a message, for the log.
class MessageWait : public WaitContext {
 public:
  MessageWait(const P2PMessage& message, bool sending, Region& region)
      : WaitContext({sending ? "send" : "recv", 0}, deadline_),
        message_(message),
        sending_(sending),
        region_(region) {}

  MessageWait(const MessageWait&) = delete;
  MessageWait& operator=(const MessageWait&) = delete;

  // As Awaiting::show.
  void show() {
    if (message_.peer != P2PMessage::kAnyRank) awaiting_.show();
  }
  // The peer; each other rank, if any of them may send.
  RankSet missing() const override {
    return message_.peer == P2PMessage::kAnyRank
               ? RankSet::all(region_.size()) - RankSet{region_.rank()}
               : RankSet{message_.peer};
  }
  std::string describe() const override {
    return shm::describe(message_, sending_, region_.global_ranks(), region_);
  }
  bool waits(int /*rank*/) const override { return false; }

  // Whether a report is due.
  std::chrono::steady_clock::time_point looked = std::chrono::steady_clock::now();

 private:
  const P2PMessage& message_;
  bool sending_;
  Region& region_;
  Awaiting awaiting_{region_, region_.global_ranks().of(message_.peer)};
  CallDeadline deadline_{message_.timeout};
};

// The peers to ring at the end of a pass over the requests.
class DeferredRings {
 public:
  void add(int peer) { peers_ |= local_rank_bit(peer); }
  void ring(Region& region) {
    for (int peer = 0; peers_ != 0; ++peer, peers_ >>= 1) {
      if ((peers_ & 1) != 0) region.ring(peer);
    }
  }

 private:
  LocalRankMask peers_ = 0;
};

}  // namespace paceline::shm
