#include "shm/p2p/message_receiver.h"

#include <fmt/format.h>

#include "shm/memory/copy.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {

bool MessageReceiver::take_headers() {
  bool moved = false;
  for (int from = 0; from < region_.size(); ++from) {
    if (from == region_.rank()) continue;
    SendRing& send_ring = region_.memory().send_ring(from, region_.rank());
    const std::uint32_t written = send_ring.written.load(std::memory_order_acquire);
    std::uint32_t taken = send_ring.taken.load(std::memory_order_relaxed);
    if (written == taken) continue;
    if (written - taken > SendRing::kHeaders) take_header(from, {});  // refused as malformed
    for (; taken != written; ++taken)
      take_header(from, send_ring.headers[taken % SendRing::kHeaders]);
    fault_point();
    send_ring.taken.store(taken, std::memory_order_release);
    rings_.add(from);
    moved = true;
  }
  return moved;
}

// `header` is a copy: a broken peer may change the original between the checks.
void MessageReceiver::take_header(int from, MessageHeader header) {
  const std::size_t bytes = header.count * element_size(header.type);
  const std::size_t buffer = header.is_shared() ? 0 : buffer_bytes(bytes);
  std::byte* const payload =
      region_.memory().resolve(from, header.payload, sizeof(Payload) + buffer);
  std::byte* const data = header.is_shared()   ? region_.memory().resolve(from, header.data, bytes)
                          : payload != nullptr ? payload + sizeof(Payload)
                                               : nullptr;
  if (payload == nullptr || data == nullptr || header.payload % alignof(Payload) != 0) {
    region_.fail({FailureKind::mismatch,
                  {region_.global_ranks().of(from)},
                  fmt::format("rank {} sent a malformed message header in group {}",
                              region_.global_ranks().of(from), region_.options().name)},
                 {"recv", 0});
  }
  arrivals_.push_back({from, header, reinterpret_cast<Payload*>(payload), data});
}

bool MessageReceiver::match(P2PRequest& request) {
  const P2PMessage& wanted = request.message;
  const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& one) {
    return one.header.tag == wanted.tag &&
           (wanted.peer == P2PMessage::kAnyRank || wanted.peer == one.from);
  });
  if (arrival == arrivals_.end()) return false;
  const MessageHeader& header = arrival->header;
  if (header.count != wanted.count || header.type != wanted.type) {
    fail(request, FailureKind::mismatch, {arrival->from, region_.rank()},
         fmt::format("rank {} sent {} {} to rank {} with tag {}, which received {} {}",
                     region_.global_ranks().of(arrival->from), header.count, name(header.type),
                     region_.global_ranks().of(region_.rank()), header.tag, wanted.count,
                     name(wanted.type)));
  }
  request.message.peer = arrival->from;
  request.header = header;
  request.payload = arrival->payload;
  request.source = arrival->source;
  fault_point();
  request.payload->wanted.store(1, std::memory_order_release);
  rings_.add(arrival->from);
  arrivals_.erase(arrival);
  return true;
}

bool MessageReceiver::drain(P2PRequest& request) {
  const std::size_t bytes = request.message.bytes();
  Payload& payload = *request.payload;
  const bool shared = request.header.is_shared();
  if (!shared && request.moved >= payload.filled.load(std::memory_order_acquire)) return false;
  const std::size_t from = shared ? request.moved : request.moved % kBuffers;
  if (bytes > 0) {
    std::byte* const chunk = request.source + from * kChunk;
    const std::size_t size = size_of_chunk(request.moved, bytes);
    copy_of_results(2 * bytes)(advance(request.message.data, request.moved * kChunk), chunk, size);
    if (!shared) take_lines(chunk, size);
  }
  // The sender sets `withdrawn` before it releases the memory. Both sides use a read-modify-write:
  // neither the copy nor the sender's later stores can pass it.
  if (payload.withdrawn.fetch_add(0, std::memory_order_acq_rel) != 0) {
    fail(request, FailureKind::peer_lost, {request.message.peer},
         fmt::format("rank {} aborted its send and is missing in {}",
                     region_.global_ranks().of(request.message.peer), describe(request, region_)));
  }
  ++request.moved;
  fault_point();
  payload.drained.store(static_cast<std::uint32_t>(request.moved), std::memory_order_release);
  rings_.add(request.message.peer);
  return true;
}

void MessageReceiver::fail(const P2PRequest& request, FailureKind kind, const RankSet& ranks,
                           const std::string& text) {
  region_.fail({kind, region_.global_ranks().of(ranks), text}, context_of(request));
}

}  // namespace paceline::shm
