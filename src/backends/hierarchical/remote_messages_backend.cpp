#include "backends/hierarchical/remote_messages_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/idle_work.h"
#include "distributed/start.h"

namespace paceline::backends {
namespace {

// How long after a rank has left a barrier's verdict may still be read.
constexpr std::chrono::seconds kVerdictTime{1};

// The Work of such a message. Waiting for it, or asking for its state, notices that the group has
// failed.
class RemoteMessageWork final : public PacelineWork {
 public:
  RemoteMessageWork(std::shared_ptr<internode::RemoteMessages> messages,
                    std::shared_ptr<RequestWatch> watch, c10d::OpType type, const char* title,
                    const Tensors& tensors, const internode::RemoteMessages::Message& message)
      : PacelineWork(type, title, tensors, tensors, 0, message.timeout),
        messages_(std::move(messages)),
        watch_(std::move(watch)) {}

  // Call before any of the others.
  void set_request(std::shared_ptr<internode::RemoteMessages::Request> request) {
    request_ = std::move(request);
  }

  int sourceRank() const override { return internode::RemoteMessages::sender(*request_); }
  bool isCompleted() override {
    if (!PacelineWork::isCompleted()) messages_->check(*request_);
    return PacelineWork::isCompleted();
  }
  // The caller may wait only for the future.
  FuturePtr getFuture() override {
    check_not_forked();
    if (!PacelineWork::isCompleted()) watch();
    return PacelineWork::getFuture();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    using namespace std::chrono_literals;
    check_not_forked();
    std::optional<base::Deadline> deadline;
    if (timeout != kNoTimeout) deadline = base::Deadline::after(timeout);
    std::unique_ptr<shm::Awaiting> awaiting;
    while (!isCompleted()) {
      if (deadline && deadline->expired()) throw_late(timeout);
      {
        std::unique_lock lock(mutex_);
        const auto moment = base::Deadline::after(10ms);
        if (base::wait_until(cv_, lock, moment, [&] { return completed_; })) continue;
      }
      if (!awaiting) awaiting = messages_->awaiting(*request_);
      if (awaiting) awaiting->show();
    }
    return PacelineWork::wait(kNoTimeout);
  }

 private:
  void watch() {
    const std::lock_guard lock(watched_mutex_);
    if (is_watched_) return;
    watch_->add(request_);
    is_watched_ = true;
  }

  std::shared_ptr<internode::RemoteMessages> messages_;
  std::shared_ptr<RequestWatch> watch_;
  std::shared_ptr<internode::RemoteMessages::Request> request_;
  std::mutex watched_mutex_;
  bool is_watched_ = false;  // guarded by it
};

}  // namespace

RemoteMessagesBackend::RemoteMessagesBackend(const std::shared_ptr<shm::Collectives>& group,
                                             std::shared_ptr<shm::Group> local,
                                             distributed::StoreBarrier monitored_barrier,
                                             std::shared_ptr<internode::RemoteMessages> messages)
    : PacelineBackend(group, std::move(local), group->global_ranks()),
      global_ranks_(group->global_ranks()),
      monitored_barrier_(std::move(monitored_barrier)),
      messages_(std::move(messages)),
      watch_(std::make_shared<RequestWatch>(messages_)) {}

RemoteMessagesBackend::~RemoteMessagesBackend() {
  leave();
}

void RemoteMessagesBackend::leave() {
  if (!region().in_forked_child()) {
    watch_->stop();
    messages_->close();
  }
  PacelineBackend::leave();
}

void RemoteMessagesBackend::pass_monitored_barrier(std::chrono::milliseconds timeout,
                                                   bool wait_all_ranks) {
  std::vector<int> all(static_cast<std::size_t>(getSize()));
  std::iota(all.begin(), all.end(), 0);
  const auto has_left = [&](int rank) { return region().has_left(global_ranks_.of(rank)); };
  std::optional<base::Deadline> verdict_deadline;
  monitored_barrier_.pass(timeout, wait_all_ranks, [&] {
    const shm::OpContext op{"monitored_barrier", 0};
    check_peers({}, op);
    if (std::ranges::none_of(all, has_left)) return;
    // A rank may have left after it has read the verdict; this one reads it then, too.
    if (!verdict_deadline) verdict_deadline = base::Deadline::after(kVerdictTime);
    if (verdict_deadline->expired()) check_peers(all, op);
  });
}

RemoteMessagesBackend::WorkPtr RemoteMessagesBackend::remote_message(const Kind& kind,
                                                                     const Tensors& tensors,
                                                                     int peer, int tag) {
  check_usable(kind.name);
  const at::Tensor tensor = single(tensors, kind.name);
  const bool sending = kind.type == c10d::OpType::SEND;
  if (!sending) distributed::check_no_overlap(tensor, kind.name);
  auto flat = std::make_shared<Flat>(tensor, sending ? Flat::Use::in : Flat::Use::out);
  const internode::RemoteMessages::Message message{
      flat->data(), flat->count(), flat->type(), peer, tag, effective_timeout(c10d::kUnsetTimeout)};
  auto work = c10::make_intrusive<RemoteMessageWork>(messages_, watch_, kind.type, kind.title,
                                                     Tensors{tensor}, message);
  auto done = completion(work, sending ? nullptr : flat);
  work->set_request(sending ? messages_->send(message, flat, std::move(done))
                            : messages_->receive(message, flat, std::move(done)));
  return coalesced(work);
}

int RemoteMessagesBackend::checked_peer(int rank) const {
  if (rank == getRank()) {
    throw UsageError(fmt::format(
        "a message to or from rank {}, which is this rank itself: copy the tensor", rank));
  }
  if (rank >= 0 && rank < getSize()) return rank;
  throw UsageError(fmt::format("a message to or from rank {}: the group has ranks 0 to {}", rank,
                               getSize() - 1));
}

}  // namespace paceline::backends
