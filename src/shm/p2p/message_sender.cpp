#include "shm/p2p/message_sender.h"

#include <cstring>

#include "shm/sync/fault_point.h"

namespace paceline::shm {
namespace {

// Messages up to this size are sent once they are in the payload; larger ones once they are
// received.
constexpr std::size_t kEagerBytes = std::size_t{8} << 10;

std::byte* buffer_of(Payload* payload) {
  return reinterpret_cast<std::byte*>(payload + 1);
}

}  // namespace

bool MessageSender::announce(P2PRequest& request) {
  const P2PMessage& message = request.message;
  SendRing& send_ring = region_.memory().send_ring(region_.rank(), message.peer);
  const std::uint32_t written = send_ring.written.load(std::memory_order_relaxed);
  if (written - send_ring.taken.load(std::memory_order_acquire) >= SendRing::kHeaders) return false;

  const std::size_t bytes = message.bytes();
  request.header = {.count = message.count, .tag = message.tag, .type = message.type};
  request.header.data = bytes <= kEagerBytes ? CollectiveFingerprint::kNotShared
                                             : region_.memory()
                                                   .shared_offset(message.data, bytes)
                                                   .value_or(CollectiveFingerprint::kNotShared);
  const std::size_t buffer = request.header.is_shared() ? 0 : buffer_bytes(bytes);
  request.payload = new (region_.allocate_or_throw(sizeof(Payload) + buffer)) Payload{};
  request.header.payload = *region_.memory().shared_offset(request.payload, 0);
  if (bytes <= kEagerBytes) {
    if (bytes > 0) std::memcpy(buffer_of(request.payload), message.data, bytes);
    request.payload->filled.store(1, std::memory_order_relaxed);
  }
  send_ring.headers[written % SendRing::kHeaders] = request.header;
  fault_point();
  send_ring.written.store(written + 1, std::memory_order_release);
  rings_.add(message.peer);
  return true;
}

bool MessageSender::fill(P2PRequest& request) {
  const std::size_t bytes = request.message.bytes();
  const std::size_t before = request.moved;
  Payload& payload = *request.payload;
  const std::size_t drained = payload.drained.load(std::memory_order_acquire);
  if (bytes <= kEagerBytes) {
    request.moved = 1;
  } else if (request.header.is_shared()) {
    if (drained >= chunks_of(bytes)) request.moved = chunks_of(bytes);
  } else if (payload.wanted.load(std::memory_order_acquire) != 0) {
    const std::size_t filled = payload.filled.load(std::memory_order_relaxed);
    request.moved = std::min(drained, filled);
    if (filled < chunks_of(bytes) && filled - request.moved < kBuffers) {
      std::memcpy(buffer_of(&payload) + filled % kBuffers * kChunk,
                  static_cast<const std::byte*>(request.message.data) + filled * kChunk,
                  size_of_chunk(filled, bytes));
      fault_point();
      payload.filled.store(static_cast<std::uint32_t>(filled + 1), std::memory_order_release);
      rings_.add(request.message.peer);
      return true;
    }
  }
  return request.moved != before;
}

void MessageSender::release(P2PRequest& request) {
  if (request.payload != nullptr) payloads_.push_back(request.payload);
}

void MessageSender::collect() {
  std::erase_if(payloads_, [&](Payload* payload) {
    if (payload->drained.load(std::memory_order_acquire) == 0) return false;
    region_.memory().free(payload);
    return true;
  });
}

void MessageSender::withdraw(P2PRequest& request) {
  if (request.payload == nullptr) return;
  request.payload->withdrawn.exchange(1, std::memory_order_acq_rel);
  region_.memory().retire(request.payload);
  region_.ring(request.message.peer);
}

void MessageSender::retire() {
  for (Payload* const payload : payloads_) region_.memory().retire(payload);
}

}  // namespace paceline::shm
