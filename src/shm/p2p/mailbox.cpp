#include "shm/p2p/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include <paceline/error.h>

#include "shm/memory/copy.h"
#include "shm/sync/fault_point.h"

namespace paceline::shm {
namespace {

// Messages up to this size are sent once they are in the payload; larger ones once they are
// received.
constexpr std::size_t kEagerBytes = std::size_t{8} << 10;
// What one thread copies before the other threads of its process get a turn, and how many such
// chunks may be under way.
constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::size_t kBuffers = 4;
// How late a death or a deadline may be noticed while messages flow.
constexpr std::chrono::milliseconds kLookInterval{10};

std::size_t bytes_of(const Mailbox::Message& message) {
  return message.count * element_size(message.type);
}

// An empty message is one empty chunk.
std::size_t chunks_of(std::size_t bytes) {
  return std::max<std::size_t>((bytes + kChunk - 1) / kChunk, 1);
}

std::size_t size_of_chunk(std::size_t chunk, std::size_t bytes) {
  return std::min(bytes - chunk * kChunk, kChunk);
}

std::size_t buffer_bytes(std::size_t bytes) {
  return std::min(bytes, kBuffers * kChunk);
}

std::byte* buffer_of(Payload* payload) {
  return reinterpret_cast<std::byte*>(payload + 1);
}

bool is_shared(const MessageHeader& header) {
  return header.data != CollectiveFingerprint::kNotShared;
}

const char* name_of(bool sending) {
  return sending ? "send" : "recv";
}

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Region> region) : region_(std::move(region)) {}

Mailbox::~Mailbox() {
  if (region_->in_forked_child()) return;
  for (Payload* const payload : payloads_) region_->memory().retire(payload);
  for (const Request& request : sends_) {
    if (request.payload != nullptr) region_->memory().retire(request.payload);
  }
}

void Mailbox::check(bool sending, const Message& message) const {
  const char* const operation = name_of(sending);
  region_->check_usable({operation, 0});
  const bool any = message.peer == kAnyRank && !sending;
  const int size = region_->size();
  if (!any && (message.peer < 0 || message.peer >= size || message.peer == region_->rank())) {
    throw UsageError(
        fmt::format("{} with rank {}: the group has ranks 0 to {}, this one is rank {}", operation,
                    message.peer, size - 1, region_->rank()));
  }
  if (message.tag < 0) {
    throw UsageError(fmt::format("{} with tag {}: tags are not negative", operation, message.tag));
  }
}

void Mailbox::send(const Message& message, Done done) {
  post(sends_, message, std::move(done), true);
}

void Mailbox::receive(const Message& message, Done done) {
  post(receives_, message, std::move(done), false);
}

void Mailbox::post(Requests& requests, const Message& message, Done done, bool sending) {
  check(sending, message);
  std::lock_guard lock(mutex_);
  requests.push_back({.message = message,
                      .done = std::move(done),
                      .deadline = base::Deadline::after(message.timeout),
                      .sending = sending});
}

bool Mailbox::idle() const {
  std::lock_guard lock(mutex_);
  return sends_.empty() && receives_.empty();
}

bool Mailbox::move() {
  if (region_->in_forked_child()) region_->check_usable({"send", 0});
  move_some();
  return idle();
}

void Mailbox::close() {
  end_all(std::make_exception_ptr(UsageError(fmt::format(
      "the rank left group {} before its message was through", region_->options().name))));
}

void Mailbox::pump(const std::function<bool()>& enough) {
  if (region_->in_forked_child()) region_->check_usable({"recv", 0});
  while (true) {
    // Before it looks: what happens after that rings.
    const std::uint32_t heard = region_->rings();
    if (enough()) return;
    if (!move_some()) region_->listen(heard);
    look_after_peers();
  }
}

// Whether anything moved.
bool Mailbox::move_some() {
  return with_lock([&](Ended& ended) { return move_all(ended); });
}

template <typename F>
bool Mailbox::with_lock(F&& action) {
  Ended ended;
  bool result = true;
  std::exception_ptr error;
  try {
    std::lock_guard lock(mutex_);
    result = action(ended);
  } catch (const std::exception& problem) {
    error = std::current_exception();
    region_->abort(problem.what());  // unless it is the group's failure, the peers have to know
  }
  tell(ended);
  if (error) end_all(error);
  return result;
}

void Mailbox::tell(const Ended& ended) {
  if (ended.empty()) return;
  for (const End& one : ended) one.done(one.error, one.peer);
  // Other threads of this rank may wait for what this one has moved.
  wake();
}

bool Mailbox::move_all(Ended& ended) {
  bool moved = take_headers();
  // A later message to a rank must not overtake an earlier one that found its send ring full.
  LocalRankMask full = 0;
  for (auto request = sends_.begin(); request != sends_.end();) {
    const auto current = request++;
    if (current->payload == nullptr) {
      if ((full & local_rank_bit(current->message.peer)) != 0) continue;
      try {
        if (!announce(*current)) {
          full |= local_rank_bit(current->message.peer);
          continue;
        }
      } catch (const Error&) {  // there is no room for it, which is nobody else's concern
        if (region_->failed()) throw;
        end(sends_, current, ended, std::current_exception());
        continue;
      }
      moved = true;
    }
    moved = fill(*current) || moved;
    if (current->moved == chunks_of(bytes_of(current->message))) end(sends_, current, ended);
  }
  for (auto request = receives_.begin(); request != receives_.end();) {
    const auto current = request++;
    if (current->payload == nullptr && !match(*current)) continue;
    moved = drain(*current) || moved;
    if (current->moved == chunks_of(bytes_of(current->message))) end(receives_, current, ended);
  }
  collect_payloads();
  for (int peer = 0; to_ring_ != 0; ++peer, to_ring_ >>= 1) {
    if ((to_ring_ & 1) != 0) region_->ring(peer);
  }
  return moved;
}

bool Mailbox::take_headers() {
  bool moved = false;
  for (int from = 0; from < region_->size(); ++from) {
    if (from == region_->rank()) continue;
    SendRing& send_ring = region_->memory().send_ring(from, region_->rank());
    const std::uint32_t written = send_ring.written.load(std::memory_order_acquire);
    std::uint32_t taken = send_ring.taken.load(std::memory_order_relaxed);
    if (written == taken) continue;
    if (written - taken > SendRing::kHeaders) take_header(from, {});  // nonsense, which it refuses
    for (; taken != written; ++taken)
      take_header(from, send_ring.headers[taken % SendRing::kHeaders]);
    fault_point();
    send_ring.taken.store(taken, std::memory_order_release);
    to_ring_ |= local_rank_bit(from);
    moved = true;
  }
  return moved;
}

// `header` is a copy: a broken peer may change its own between the checks.
void Mailbox::take_header(int from, MessageHeader header) {
  const std::size_t bytes = header.count * element_size(header.type);
  const std::size_t buffer = is_shared(header) ? 0 : buffer_bytes(bytes);
  std::byte* const payload =
      region_->memory().resolve(from, header.payload, sizeof(Payload) + buffer);
  const std::byte* const data = is_shared(header)
                                    ? region_->memory().resolve(from, header.data, bytes)
                                : payload != nullptr ? payload + sizeof(Payload)
                                                     : nullptr;
  if (payload == nullptr || data == nullptr || header.payload % alignof(Payload) != 0) {
    region_->fail({FailureKind::mismatch,
                   {region_->numbers().of(from)},
                   fmt::format("rank {} sent a message that makes no sense in group {}",
                               region_->numbers().of(from), region_->options().name)},
                  {"recv", 0});
  }
  arrivals_.push_back({from, header, reinterpret_cast<Payload*>(payload), data});
}

// False if the send ring is full.
bool Mailbox::announce(Request& request) {
  const Message& message = request.message;
  SendRing& send_ring = region_->memory().send_ring(region_->rank(), message.peer);
  const std::uint32_t written = send_ring.written.load(std::memory_order_relaxed);
  if (written - send_ring.taken.load(std::memory_order_acquire) >= SendRing::kHeaders) return false;

  const std::size_t bytes = bytes_of(message);
  request.header = {.count = message.count, .tag = message.tag, .type = message.type};
  request.header.data = bytes <= kEagerBytes ? CollectiveFingerprint::kNotShared
                                             : region_->memory()
                                                   .shared_offset(message.data, bytes)
                                                   .value_or(CollectiveFingerprint::kNotShared);
  const std::size_t buffer = is_shared(request.header) ? 0 : buffer_bytes(bytes);
  request.payload = new (region_->allocate_or_throw(sizeof(Payload) + buffer)) Payload{};
  request.header.payload = *region_->memory().shared_offset(request.payload, 0);
  if (bytes <= kEagerBytes) {
    if (bytes > 0) std::memcpy(buffer_of(request.payload), message.data, bytes);
    request.payload->filled.store(1, std::memory_order_relaxed);
  }
  send_ring.headers[written % SendRing::kHeaders] = request.header;
  fault_point();
  send_ring.written.store(written + 1, std::memory_order_release);
  to_ring_ |= local_rank_bit(message.peer);
  return true;
}

// Of a message that is announced: whether it moved on.
bool Mailbox::fill(Request& request) {
  const std::size_t bytes = bytes_of(request.message);
  const std::size_t before = request.moved;
  Payload& payload = *request.payload;
  const std::size_t drained = payload.drained.load(std::memory_order_acquire);
  if (bytes <= kEagerBytes) {
    request.moved = 1;
  } else if (is_shared(request.header)) {
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
      to_ring_ |= local_rank_bit(request.message.peer);
      return true;
    }
  }
  return request.moved != before;
}

// Whether there is a message for it.
bool Mailbox::match(Request& request) {
  const Message& wanted = request.message;
  const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& one) {
    return one.header.tag == wanted.tag && (wanted.peer == kAnyRank || wanted.peer == one.from);
  });
  if (arrival == arrivals_.end()) return false;
  const MessageHeader& header = arrival->header;
  if (header.count != wanted.count || header.type != wanted.type) {
    fail(request, FailureKind::mismatch, {arrival->from, region_->rank()},
         fmt::format("rank {} sent {} {} to rank {} with tag {}, which received {} {}",
                     region_->numbers().of(arrival->from), header.count, name(header.type),
                     region_->numbers().of(region_->rank()), header.tag, wanted.count,
                     name(wanted.type)));
  }
  request.message.peer = arrival->from;
  request.header = header;
  request.payload = arrival->payload;
  request.source = arrival->source;
  fault_point();
  request.payload->wanted.store(1, std::memory_order_release);
  to_ring_ |= local_rank_bit(arrival->from);
  arrivals_.erase(arrival);
  return true;
}

bool Mailbox::drain(Request& request) {
  const std::size_t bytes = bytes_of(request.message);
  Payload& payload = *request.payload;
  const bool shared = is_shared(request.header);
  if (!shared && request.moved >= payload.filled.load(std::memory_order_acquire)) return false;
  const std::size_t from = shared ? request.moved : request.moved % kBuffers;
  if (bytes > 0) {
    copy_of_results(2 * bytes)(advance(request.message.data, request.moved * kChunk),
                               request.source + from * kChunk, size_of_chunk(request.moved, bytes));
  }
  // The sender says so before it lets go of the memory. Both sides use a read-modify-write, past
  // which neither the copy nor the sender's later stores can move.
  if (payload.withdrawn.fetch_add(0, std::memory_order_acq_rel) != 0) {
    fail(request, FailureKind::peer_lost, {request.message.peer},
         fmt::format("rank {} gave up sending in {}", region_->numbers().of(request.message.peer),
                     describe(request)));
  }
  ++request.moved;
  fault_point();
  payload.drained.store(static_cast<std::uint32_t>(request.moved), std::memory_order_release);
  to_ring_ |= local_rank_bit(request.message.peer);
  return true;
}

void Mailbox::collect_payloads() {
  std::erase_if(payloads_, [&](Payload* payload) {
    if (payload->drained.load(std::memory_order_acquire) == 0) return false;
    region_->memory().free(payload);
    return true;
  });
}

void Mailbox::end(Requests& requests, Requests::iterator request, Ended& ended,
                  std::exception_ptr error) {
  if (request->sending && request->payload != nullptr) payloads_.push_back(request->payload);
  ended.push_back({std::move(request->done), std::move(error), request->message.peer});
  requests.erase(request);
}

bool Mailbox::is_time_to_look() {
  const auto now = std::chrono::steady_clock::now();
  std::lock_guard lock(mutex_);
  if (!region_->failed() && now - looked_ < kLookInterval) return false;
  looked_ = now;
  return true;
}

void Mailbox::look_after_peers() {
  if (!is_time_to_look()) return;
  std::vector<bool> here;
  for (int peer = 0; peer < region_->size(); ++peer) here.push_back(region_->peers().is_here(peer));
  with_lock([&](Ended& ended) {
    region_->check_usable({"send or recv", 0});
    // What a rank did before it was lost, or before the deadline, counts. No request must come
    // between these rounds and the look at all of them.
    for (std::size_t i = 0; i <= kBuffers && move_all(ended); ++i) {
    }
    for (const Request& request : sends_) check_request(request, here);
    for (const Request& request : receives_) check_request(request, here);
    return true;
  });
}

// `here`: which ranks were before the last rounds.
void Mailbox::check_request(const Request& request, const std::vector<bool>& here) {
  const OpContext op{name_of(request.sending), 0};
  int missing = -1;
  bool hope = false;
  for (int peer = 0; peer < region_->size(); ++peer) {
    if (peer == region_->rank()) continue;
    const bool concerned = request.message.peer == peer || request.message.peer == kAnyRank;
    if (here[static_cast<std::size_t>(peer)]) {
      hope = hope || concerned;
      continue;
    }
    // A death concerns everybody; that a rank has left, only those who wait for it.
    if (region_->peers().has_died(peer)) region_->fail_lost(peer, describe(request), op);
    if (concerned) missing = peer;
  }
  if (!hope && missing >= 0) region_->fail_lost(missing, describe(request), op);
  if (!request.deadline.expired()) return;
  const bool any = request.message.peer == kAnyRank;
  fail(request, FailureKind::timeout, any ? RankSet() : RankSet{request.message.peer},
       fmt::format("{} {} within the timeout of {} s: {}",
                   any ? "no rank" : describe_ranks({region_->numbers().of(request.message.peer)}),
                   any               ? "sent"
                   : request.sending ? "did not receive"
                                     : "did not send",
                   static_cast<double>(request.deadline.budget().count()) / 1000.0,
                   describe(request)));
}

std::string Mailbox::describe(const Request& request) const {
  const Message& message = request.message;
  const std::string peer = message.peer == kAnyRank
                               ? "any rank"
                               : fmt::format("rank {}", region_->numbers().of(message.peer));
  return fmt::format("{} of {} {} {} {} with tag {} in group {}", name_of(request.sending),
                     message.count, name(message.type), request.sending ? "to" : "from", peer,
                     message.tag, region_->options().name);
}

void Mailbox::fail(const Request& request, FailureKind kind, const RankSet& ranks,
                   const std::string& text) {
  region_->fail({kind, region_->numbers().of(ranks), text}, {name_of(request.sending), 0});
}

void Mailbox::end_all(const std::exception_ptr& error) {
  Ended ended;
  {
    std::lock_guard lock(mutex_);
    for (const Request& request : sends_) {
      if (request.payload == nullptr) continue;
      request.payload->withdrawn.exchange(1, std::memory_order_acq_rel);
      region_->memory().retire(request.payload);
      region_->ring(request.message.peer);
    }
    for (Requests* const requests : {&sends_, &receives_}) {
      for (Request& request : *requests) {
        ended.push_back({std::move(request.done), error, request.message.peer});
      }
      requests->clear();
    }
  }
  tell(ended);
}

}  // namespace paceline::shm
