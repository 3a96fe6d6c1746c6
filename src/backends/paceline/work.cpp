#include "backends/paceline/work.h"

#include <ATen/core/ivalue.h>

#include <paceline/error.h>

namespace paceline::backends {

NodeWork::NodeWork(c10d::OpType type, std::vector<at::Tensor> outputs, std::uint64_t sequence)
    : c10d::Work(-1, type), outputs_(std::move(outputs)), sequence_(sequence) {}

void NodeWork::complete(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = std::move(error);
    future = future_;
  }
  if (future) settle(*future);
  cv_.notify_all();
}

bool NodeWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto done = [&] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, done);
  } else if (!cv_.wait_for(lock, timeout, done)) {
    throw Timeout("the operation is not complete after " + std::to_string(timeout.count()) + " ms",
                  {}, c10d::opTypeToString(opType_), sequence_);
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> NodeWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completed_) settle(*future_);
  }
  return future_;
}

void NodeWork::settle(c10::ivalue::Future& future) const {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace paceline::backends
