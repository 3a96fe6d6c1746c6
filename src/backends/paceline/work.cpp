#include "backends/paceline/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <optional>

#include "base/deadline.h"
#include "base/idle_work.h"

namespace paceline::backends {
namespace {

std::uint64_t next_key() {
  static std::atomic<std::uint64_t> keys{0};
  return keys.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Zero would mean for ever.
constexpr std::chrono::milliseconds kShortest{1};

bool is_peer_error(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const PeerError&) {
    return true;
  } catch (...) {  // any other error
  }
  return false;
}

bool is_profiled() {
  return at::hasCallbacks();
}

}  // namespace

PacelineWork::PacelineWork(c10d::OpType type, const char* title,
                           const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
                           std::uint64_t sequence, std::chrono::milliseconds timeout)
    // With a title c10d prepares a record even if nobody wants it.
    : distributed::SelfReportingWork(-1, type, is_profiled() ? title : nullptr,
                                     is_profiled() ? std::optional(inputs) : std::nullopt),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      timeout_(timeout),
      key_(next_key()) {}

PacelineWork::FuturePtr PacelineWork::complete(const std::exception_ptr& error, GroupHooks& hooks) {
  FuturePtr future;
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  {
    std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = error;
    future = future_;
  }
  cv_.notify_all();
  if (!error) hooks.completion.run(c10d::CompletionHookArgs{key_, std::nullopt});
  if (is_peer_error(error)) hooks.abort.run();
  return future;
}

bool PacelineWork::isCompleted() {
  base::do_idle_work();
  return Work::isCompleted();
}

bool PacelineWork::wait(std::chrono::milliseconds timeout) {
  check_not_forked();
  std::unique_lock lock(mutex_);
  const auto limit = timeout == kNoTimeout ? base::Deadline::kLongest : timeout;
  if (!base::wait_until(cv_, lock, base::Deadline::after(limit), [&] { return completed_; })) {
    throw_late(timeout);
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void PacelineWork::check_not_forked() const {
  if (!process_.is_forked_child()) return;
  throw UsageError(
      c10d::opTypeToString(opType_) +
      " of the parent process, waited for in a forked child: it belongs to the parent");
}

void PacelineWork::throw_late(std::chrono::milliseconds timeout) const {
  throw Timeout(
      fmt::format("{} is not complete after {} ms", c10d::opTypeToString(opType_), timeout.count()),
      {}, c10d::opTypeToString(opType_), sequence_);
}

c10::intrusive_ptr<c10::ivalue::Future> PacelineWork::getFuture() {
  if (base::has_idle_work()) {
    // Waiting for a future of LibTorch does no idle work, so it is complete from the start.
    check_not_forked();
    for (const base::Pause pause; !isCompleted();) pause.rest();
  }
  std::unique_lock lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) settle(*future_);
  }
  return future_;
}

void PacelineWork::settle(c10::ivalue::Future& future) const {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

int MessageWork::sourceRank() const {
  if (opType_ == c10d::OpType::SEND) throw UsageError("sourceRank of a send: a recv has one");
  return source_;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  std::optional<base::Deadline> deadline;
  if (timeout != kNoTimeout) deadline = base::Deadline::after(timeout);
  mailbox_->pump_for(message_, opType_ == c10d::OpType::SEND, [&] {
    if (isCompleted()) return PacelineWork::wait(kNoTimeout);
    if (deadline && deadline->expired()) throw_late(timeout);
    return false;
  });
  return true;
}

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = base::Deadline::after(timeout);
  for (const auto& work : works_) {
    work->wait(timeout == kNoTimeout ? kNoTimeout : std::max(deadline.remaining(), kShortest));
  }
  return true;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [tensors = result()](c10::ivalue::Future& all) {
        for (const c10::IValue& one : all.value().toListRef()) one.toFuture()->waitAndThrow();
        return c10::IValue(tensors);
      },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace paceline::backends
