#include "internode/remote_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/idle_work.h"
#include "internode/node_links.h"

namespace paceline::internode {

using namespace std::chrono_literals;

namespace {

// How long a message may take after its other rank has left, unless its payload is being received.
constexpr std::chrono::seconds kLeftTime{1};

constexpr std::uint32_t header_tag(int tag) {
  return 2 * static_cast<std::uint32_t>(tag);
}
constexpr std::uint32_t payload_tag(std::uint32_t number) {
  return 2 * (number % RemoteMessages::kTags) + 1;
}

}  // namespace

// A callback of a transfer must not destroy it: both are kept until the request is finished.
class RemoteMessages::Request : public std::enable_shared_from_this<Request> {
 public:
  struct Header {
    std::uint64_t count;
    std::uint32_t type;
    std::uint32_t payload;  // the number of the message among those to this receiver
  };

  Request(const Message& what, std::shared_ptr<const void> data, Done when_done, bool sends)
      : message(what),
        memory(std::move(data)),
        done(std::move(when_done)),
        sending(sends),
        deadline(base::Deadline::after(what.timeout)) {}

  Message message;
  std::shared_ptr<const void> memory;
  Done done;
  bool sending;
  base::Deadline deadline;
  Header header{};
  std::mutex mutex{};  // guards what follows
  std::unique_ptr<Engine::Transfer> header_transfer{};
  std::unique_ptr<Engine::Transfer> payload_transfer{};
  // What the engine said, and how long its cause may be unknown.
  std::string engine_error{};
  shm::RankSet culprits{};
  std::optional<base::Deadline> cause_deadline{};
  std::optional<base::Deadline> left_deadline{};  // set once the peer has left
  bool transferred = false;                       // one of two transfers of a send is complete
  bool ended = false;                             // with or without an error
  bool finished = false;                          // `done` has returned, and is destroyed
  std::condition_variable has_finished{};
};

RemoteMessages::RemoteMessages(std::shared_ptr<shm::Region> region, shm::GlobalRanks ranks,
                               int rank, std::unique_ptr<Engine> engine)
    : region_(std::move(region)),
      global_ranks_(std::move(ranks)),
      rank_(rank),
      engine_(std::move(engine)) {}

RemoteMessages::~RemoteMessages() {
  if (region_->in_forked_child()) {
    std::ignore = engine_.release();  // its threads and locks are the parent's
  } else {
    close();
  }
}

std::shared_ptr<RemoteMessages::Request> RemoteMessages::send(const Message& message,
                                                              std::shared_ptr<const void> memory,
                                                              Done done) {
  return post(std::make_shared<Request>(message, std::move(memory), std::move(done), true));
}

std::shared_ptr<RemoteMessages::Request> RemoteMessages::receive(const Message& message,
                                                                 std::shared_ptr<const void> memory,
                                                                 Done done) {
  return post(std::make_shared<Request>(message, std::move(memory), std::move(done), false));
}

std::shared_ptr<RemoteMessages::Request> RemoteMessages::post(
    const std::shared_ptr<Request>& request) {
  const Message& message = request->message;
  const char* const operation = request->sending ? "send" : "recv";
  if (message.tag < 0 || message.tag >= kTags) {
    throw UsageError(
        fmt::format("{} with tag {} to or from rank {} on another node: tags are from 0 "
                    "to {} there",
                    operation, message.tag, global_ranks_.of(message.peer), kTags - 1));
  }
  region_->check_usable({operation, 0});
  std::list<std::shared_ptr<Request>> finished;  // destroyed without the lock
  engine_->run_locked([&] {
    const std::lock_guard lock(mutex_);
    for (auto one = requests_.begin(); one != requests_.end();) {
      const auto next = std::next(one);
      const std::lock_guard own((*one)->mutex);
      if ((*one)->finished) finished.splice(finished.end(), requests_, one);
      one = next;
    }
    // With the lock: headers with one tag arrive in the order in which they were started.
    start(*request);
    requests_.push_back(request);
  });
  return request;
}

void RemoteMessages::start(Request& request) {
  const std::lock_guard lock(request.mutex);
  if (request.sending) {
    request.header = {request.message.count, static_cast<std::uint32_t>(request.message.type),
                      payloads_sent_[request.message.peer]++};
  }
  request.header_transfer = transfer(request, false);
  if (request.sending && request.message.bytes() > 0) {
    request.payload_transfer = transfer(request, true);
  }
}

// With the request's lock, so that its callback finds the transfer where it belongs.
std::unique_ptr<Engine::Transfer> RemoteMessages::transfer(Request& request, bool is_payload) {
  Engine::Message message{request.message.peer, reinterpret_cast<std::byte*>(&request.header),
                          sizeof(request.header)};
  if (is_payload) {
    message.data = static_cast<std::byte*>(request.message.data);
    message.bytes = request.message.bytes();
  }
  const std::vector<Engine::Message> one{message};
  const std::vector<Engine::Message> none;
  try {
    return engine_->start(
        is_payload ? payload_tag(request.header.payload) : header_tag(request.message.tag),
        request.sending ? one : none, request.sending ? none : one,
        [this, &request, is_payload] { handle(request, is_payload); });
  } catch (const std::exception& error) {
    if (!is_payload) throw;
    // The header is on its way, or here: the other rank would wait for the rest.
    const shm::RankSet own = global_ranks_.of(shm::RankSet{rank_});
    fail(request, {shm::FailureKind::peer_lost, culprits_of(error, own),
                   fmt::format("{} cannot go on with {}: {}", global_ranks_.describe_global(own),
                               describe(request), error.what())});
  }
}

// A transfer has ended. On a thread of the engine.
void RemoteMessages::handle(Request& request, bool is_payload) {
  std::exception_ptr error;
  {
    const std::lock_guard lock(request.mutex);
    if (request.ended) return;
    try {
      advance(request, is_payload);
    } catch (...) {
      error = std::current_exception();
      request.ended = true;
    }
    if (!request.ended) return;
  }
  finish(request, error);
}

// With the request's lock.
void RemoteMessages::advance(Request& request, bool is_payload) {
  try {
    (is_payload ? request.payload_transfer : request.header_transfer)->check();
  } catch (const std::exception& error) {
    request.engine_error = error.what();
    request.culprits = culprits_of(error, peer_of(request));
    request.cause_deadline = base::Deadline::after(kCauseTime);
    return;
  }
  const Message& message = request.message;
  const bool has_payload = message.bytes() > 0;
  if (request.sending) {
    request.ended = !has_payload || std::exchange(request.transferred, true);
    return;
  }
  if (request.message.peer == Message::kAnyRank) {
    request.message.peer = request.header_transfer->sender();
  }
  const auto& [count, type, number] = request.header;
  if (count != message.count || type != static_cast<std::uint32_t>(message.type)) {
    fail(request,
         {shm::FailureKind::mismatch, peer_of(request),
          fmt::format("{} sent {} {} with tag {} to {}, which received {} {}",
                      global_ranks_.describe({message.peer}), count,
                      name(static_cast<shm::DataType>(type)), message.tag,
                      global_ranks_.describe({rank_}), message.count, name(message.type))});
  }
  request.ended = is_payload || !has_payload;
  if (request.ended) return;
  request.left_deadline.reset();
  request.payload_transfer = transfer(request, true);
}

int RemoteMessages::sender(Request& request) {
  const std::lock_guard lock(request.mutex);
  return request.message.peer;
}

std::unique_ptr<shm::Awaiting> RemoteMessages::awaiting(Request& request) {
  const std::lock_guard lock(request.mutex);
  const int peer = request.message.peer;
  if (peer == Message::kAnyRank) return nullptr;
  return std::make_unique<shm::Awaiting>(*region_, global_ranks_.of(peer));
}

bool RemoteMessages::check(Request& request) {
  std::exception_ptr error;
  {
    const std::lock_guard lock(request.mutex);
    if (request.ended) return true;
    try {
      region_->check_peers({}, {request.sending ? "send" : "recv", 0});
      if (request.cause_deadline && request.cause_deadline->expired()) {
        fail(request, {shm::FailureKind::peer_lost, request.culprits,
                       fmt::format("{} failed: {}", describe(request), request.engine_error)});
      }
      check_left(request);
      if (!request.deadline.expired()) return false;
      fail(request,
           shm::late_message(request.message, request.sending, rank_, global_ranks_, *region_));
    } catch (...) {
      error = std::current_exception();
    }
  }
  end(request, error);
  return true;
}

// With the request's lock. A rank that has left sends and receives nothing more. What it has sent
// may still arrive. Its engine may outlive it and close no connection, so that no error comes.
void RemoteMessages::check_left(Request& request) {
  const int peer = request.message.peer;
  if (peer == Message::kAnyRank || !region_->has_left(global_ranks_.of(peer))) return;
  const bool has_begun = !request.sending && request.payload_transfer != nullptr;
  if (!request.left_deadline) {
    request.left_deadline = base::Deadline::after(has_begun ? kCauseTime : kLeftTime);
  }
  if (request.engine_error.empty() && !request.left_deadline->expired()) return;
  fail(request, failure_of_left(global_ranks_, peer_of(request), describe(request)));
}

// Not on a thread of the engine.
void RemoteMessages::end(Request& request, const std::exception_ptr& error) {
  std::unique_ptr<Engine::Transfer> header;
  std::unique_ptr<Engine::Transfer> payload;
  {
    const std::lock_guard lock(request.mutex);
    if (request.ended) return;
    request.ended = true;
    header = std::move(request.header_transfer);
    payload = std::move(request.payload_transfer);
  }
  // The engine may go on with the header and the data. It gets nothing of `done`, which may hold
  // this object, and so the engine.
  const auto memory = request.weak_from_this().lock();  // which does not throw
  if (header) header->abandon(memory);
  if (payload) payload->abandon(memory);
  header.reset();
  payload.reset();
  finish(request, error);
}

void RemoteMessages::finish(Request& request, const std::exception_ptr& error) {
  std::exchange(request.done, nullptr)(error);  // it may hold what holds the request
  std::shared_ptr<const void> memory;           // destroyed without the lock
  const std::lock_guard lock(request.mutex);
  if (!error) memory = std::move(request.memory);
  request.finished = true;
  request.has_finished.notify_all();
}

void RemoteMessages::close() {
  std::list<std::shared_ptr<Request>> requests;
  {
    const std::lock_guard lock(mutex_);
    requests = std::move(requests_);
  }
  const auto error = std::make_exception_ptr(UsageError(fmt::format(
      "the rank left group {} before its message was complete", region_->options().name)));
  for (const auto& request : requests) end(*request, error);
  // A thread of the engine may be in the middle of one's `done`. What that holds, which may be this
  // object, must not be left to it: the thread cannot destroy its own engine.
  for (const auto& request : requests) {
    std::unique_lock lock(request->mutex);
    base::wait(request->has_finished, lock, [&] { return request->finished; });
  }
}

void RemoteMessages::fail(const Request& request, const shm::Failure& failure) {
  region_->fail(failure, {request.sending ? "send" : "recv", 0});
}

// Global; none if it is not known.
shm::RankSet RemoteMessages::peer_of(const Request& request) const {
  if (request.message.peer == Message::kAnyRank) return {};
  return global_ranks_.of(shm::RankSet{request.message.peer});
}

std::string RemoteMessages::describe(const Request& request) const {
  return shm::describe(request.message, request.sending, global_ranks_, *region_);
}

}  // namespace paceline::internode
