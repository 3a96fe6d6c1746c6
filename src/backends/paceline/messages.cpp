// c10d's send and recv in terms of shm::Mailbox.

#include <paceline/error.h>

#include "backends/paceline/backend.h"
#include "distributed/start.h"

namespace paceline::backends {
namespace {

// Settles on another thread: callbacks may wait for other messages, and this thread may have to
// drive their progress.
void settle_elsewhere(ProgressThreads& threads, const c10::intrusive_ptr<PacelineWork>& work,
                      const PacelineWork::FuturePtr& future) {
  const auto settle = [work, future] { work->settle(*future); };
  try {
    threads.enqueue([settle] { return ProgressThreads::After(settle); });
  } catch (const Error&) {  // no thread available
    settle();
  }
}

}  // namespace

std::function<void(std::exception_ptr)> PacelineBackend::completion(
    const c10::intrusive_ptr<PacelineWork>& work, std::shared_ptr<Flat> flat) const {
  return [work, flat = std::move(flat), hooks = hooks_,
          callbacks = callbacks_](std::exception_ptr error) {
    try {
      if (flat && !error) flat->write_back();
    } catch (...) {
      error = std::current_exception();
    }
    const auto future = work->complete(error, *hooks);
    if (future) settle_elsewhere(*callbacks, work, future);
  };
}

// The message moves a contiguous tensor; a receive writes it back when it completes.
PacelineBackend::WorkPtr PacelineBackend::message(const Kind& kind, const Tensors& tensors,
                                                  int peer, int tag, std::optional<int> source) {
  check_usable(kind.name);
  const at::Tensor tensor = single(tensors, kind.name);
  const bool sending = kind.type == c10d::OpType::SEND;
  if (!sending) distributed::check_no_overlap(tensor, kind.name);
  auto flat = std::make_shared<Flat>(tensor, sending ? Flat::Use::in : Flat::Use::out);
  const shm::Mailbox::Message message{
      flat->data(), flat->count(), flat->type(), peer, tag, effective_timeout(c10d::kUnsetTimeout)};
  auto work =
      c10::make_intrusive<MessageWork>(mailbox_, kind.type, kind.title, Tensors{tensor}, message);
  auto done = [work, source, complete = completion(work, sending ? nullptr : flat), flat](
                  const std::exception_ptr& error, int sender) {
    work->set_source(source.value_or(sender));
    complete(error);
  };
  p2p_progress_->start();  // before the request exists, since it may throw
  sending ? mailbox_->send(message, std::move(done)) : mailbox_->receive(message, std::move(done));
  if (!mailbox_->move()) p2p_progress_->call();
  return coalesced(work);
}

PacelineBackend::WorkPtr PacelineBackend::send(Tensors& tensors, int to, int tag) {
  return message({c10d::OpType::SEND, "send", "paceline:send"}, tensors, to, tag);
}

PacelineBackend::WorkPtr PacelineBackend::recv(Tensors& tensors, int from, int tag) {
  return message({c10d::OpType::RECV, "recv", "paceline:recv"}, tensors, from, tag);
}

PacelineBackend::WorkPtr PacelineBackend::recvAnysource(Tensors& tensors, int tag) {
  return message({c10d::OpType::RECVANYSOURCE, "recv", "paceline:recvAnySource"}, tensors,
                 shm::Mailbox::kAnyRank, tag);
}

}  // namespace paceline::backends
