#include <ATen/MemoryOverlap.h>
#include <ATen/ops/record_stream.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/log.h"
#include "distributed/devices/streams.h"
#include "distributed/reported_wait.h"
#include "distributed/start.h"

namespace paceline {

using distributed::translate;

namespace distributed {
namespace {

// Once for each operation, since programs call them in loops.
void warn_of_no_member(const std::string& operation) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  {
    const std::lock_guard lock(mutex);
    if (!warned.insert(operation).second) return;
  }
  // Without the lock: the program's callback may call an operation, too.
  base::log(LogLevel::warning, "{} on a rank that is not a member of the group does nothing",
            operation);
}

}  // namespace

BackendPtr backend_of(const ProcessGroup& group, c10::DeviceType device, const char* operation) {
  check_not_forked(operation);
  if (group.is_member()) {
    return translate(operation, [&] { return group.c10d()->getBackend(device); });
  }
  warn_of_no_member(operation);
  return nullptr;
}

c10::DeviceType device_of(const at::Tensor& tensor, const char* operation) {
  if (tensor.defined()) return tensor.device().type();
  throw UsageError(std::string(operation) + " of an undefined tensor");
}

void check_no_overlap(const at::Tensor& output, const char* operation) {
  if (!output.defined() || output.layout() != at::kStrided ||
      at::has_internal_overlap(output) != at::MemOverlap::Yes) {
    return;
  }
  throw UsageError(
      fmt::format("{} into a tensor of {} {} whose elements share memory, as after expand()",
                  operation, output.numel(), c10::toString(output.scalar_type())));
}

Tensors contiguous(const Tensors& tensors) {
  Tensors contiguous;
  for (const at::Tensor& tensor : tensors) {
    contiguous.push_back(tensor.layout() == at::kStrided
                             ? tensor.resolve_conj().resolve_neg().contiguous()
                             : tensor);
  }
  return contiguous;
}

Tensors flat(const Tensors& tensors) {
  Tensors flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.layout() == at::kStrided ? tensor.view({-1}) : tensor);
  }
  return flat;
}

}  // namespace distributed

namespace {

c10d::Work& c10d_work(const c10::intrusive_ptr<c10::intrusive_ptr_target>& work) {
  return static_cast<c10d::Work&>(*work);
}

}  // namespace

Work::Work(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors,
           std::vector<at::Tensor> contiguous, ProcessGroup group)
    : work_(std::move(work)),
      tensors_(std::move(tensors)),
      contiguous_(std::move(contiguous)),
      group_(std::move(group)) {}

void Work::wait() {
  translate("wait", [&] {
    // Null also where NCCL has put the call into the current stream.
    if (work_) distributed::wait_and_report(c10d_work(work_), group_);
    write_back();
  });
}

void Work::write_back() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& written = contiguous_[i];
    if (written.is_same(tensors_[i])) continue;
    tensors_[i].copy_(written);
    // It is freed here, and the call may have allocated it for another stream.
    if (!written.is_cpu()) written.record_stream(distributed::current_stream(written.device()));
  }
  tensors_.clear();
  contiguous_.clear();
}

void Work::wait(std::chrono::milliseconds timeout) {
  translate("wait", [&] {
    if (work_) {
      auto limited = distributed::with_limited_wait(
          c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&c10d_work(work_)));
      // Other threads may ask whether it is complete, as long as there is none in its place.
      if (limited.get() != work_.get()) work_ = std::move(limited);
    }
    if (work_ && !distributed::wait_within(c10d_work(work_), timeout)) {
      throw Timeout(fmt::format("{} is not complete after {} s",
                                c10d::opTypeToString(c10d_work(work_).retrieveOpType()),
                                static_cast<double>(timeout.count()) / 1000.0),
                    {}, "wait", 0);
    }
    write_back();
  });
}

int Work::source_rank() const {
  if (!work_) return -1;
  const int rank = translate("source_rank", [&] { return c10d_work(work_).sourceRank(); });
  return rank < 0 ? -1 : distributed::global_rank_of(group_, rank);
}

bool Work::is_completed() const {
  return !work_ || c10d_work(work_).isCompleted();
}

}  // namespace paceline
