// Messages between ranks on different nodes in terms of internode::RemoteMessages.

#include <fmt/format.h>

#include <chrono>
#include <optional>
#include <utility>

#include <paceline/error.h>

#include "backends/hierarchical/backend.h"
#include "base/deadline.h"
#include "distributed/start.h"

namespace paceline::backends {
namespace {

// The Work of such a message. Waiting for it, or asking for its state, notices that the group has
// failed.
class RemoteMessageWork final : public PacelineWork {
 public:
  RemoteMessageWork(std::shared_ptr<internode::RemoteMessages> messages, c10d::OpType type,
                    const char* title, const Tensors& tensors,
                    const internode::RemoteMessages::Message& message)
      : PacelineWork(type, title, tensors, tensors, 0, message.timeout),
        messages_(std::move(messages)),
        source_(message.peer) {}

  // Call before any of the others.
  void set_request(std::shared_ptr<internode::RemoteMessages::Request> request) {
    request_ = std::move(request);
  }

  int sourceRank() const override { return source_; }
  bool isCompleted() override {
    if (!PacelineWork::isCompleted()) messages_->check(*request_);
    return PacelineWork::isCompleted();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    using namespace std::chrono_literals;
    check_not_forked();
    std::optional<base::Deadline> deadline;
    if (timeout != kNoTimeout) deadline = base::Deadline::after(timeout);
    while (!isCompleted()) {
      if (deadline && deadline->expired()) throw_late(timeout);
      std::unique_lock lock(mutex_);
      cv_.wait_for(lock, 10ms, [&] { return completed_; });
    }
    return PacelineWork::wait(kNoTimeout);
  }

 private:
  std::shared_ptr<internode::RemoteMessages> messages_;
  std::shared_ptr<internode::RemoteMessages::Request> request_;
  int source_;
};

}  // namespace

bool HierarchicalBackend::is_remote(int rank) const {
  const internode::NodeMap& map = nodes_->map();
  return rank >= 0 && rank < map.size() && map.node_of(rank) != map.node();
}

HierarchicalBackend::WorkPtr HierarchicalBackend::remote_message(const Kind& kind,
                                                                 const Tensors& tensors, int peer,
                                                                 int tag) {
  check_usable(kind.name);
  const at::Tensor tensor = single(tensors, kind.name);
  const bool sending = kind.type == c10d::OpType::SEND;
  if (!sending) distributed::check_no_overlap(tensor, kind.name);
  auto flat = std::make_shared<Flat>(tensor, sending ? Flat::Use::in : Flat::Use::out);
  const internode::RemoteMessages::Message message{
      flat->data(), flat->count(), flat->type(), peer, tag, effective_timeout(c10d::kUnsetTimeout)};
  auto work = c10::make_intrusive<RemoteMessageWork>(messages_, kind.type, kind.title,
                                                     Tensors{tensor}, message);
  // Also keeps a copy of what is sent.
  auto done = [complete = completion(work, sending ? nullptr : flat),
               flat](const std::exception_ptr& error) { complete(error); };
  work->set_request(sending ? messages_->send(message, std::move(done))
                            : messages_->receive(message, std::move(done)));
  return coalesced(work);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::send(Tensors& tensors, int to, int tag) {
  constexpr Kind kKind{c10d::OpType::SEND, "send", "paceline:send"};
  if (is_remote(to)) return remote_message(kKind, tensors, to, tag);
  return message(kKind, tensors, nodes_->map().local_rank_of(checked_peer(to)), tag);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::recv(Tensors& tensors, int from, int tag) {
  constexpr Kind kKind{c10d::OpType::RECV, "recv", "paceline:recv"};
  if (is_remote(from)) return remote_message(kKind, tensors, from, tag);
  return message(kKind, tensors, nodes_->map().local_rank_of(checked_peer(from)), tag, from);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::recvAnysource(Tensors& /*tensors*/, int /*tag*/) {
  throw UsageError(
      fmt::format("recv from any rank in group {}, which spans {} nodes: name the sender",
                  nodes_->region()->options().name, nodes_->map().nodes()));
}

int HierarchicalBackend::checked_peer(int rank) const {
  if (rank >= 0 && rank < getSize() && rank != getRank()) return rank;
  throw UsageError(
      fmt::format("a message to or from rank {}: the group has ranks 0 to {}, this one "
                  "is rank {}",
                  rank, getSize() - 1, getRank()));
}

}  // namespace paceline::backends
