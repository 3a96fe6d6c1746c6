#include "parallel/ddp/hook_channel.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <condition_variable>
#include <mutex>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/deadline.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline::ddp {
namespace {

std::chrono::milliseconds timeout_of(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions()->timeout;
  } catch (const c10::Error&) {  // it has none
    return kBackendDefaultTimeout;
  }
}

// Throws what the future throws, and Error if nobody completes it.
void await(c10::ivalue::Future& future, std::chrono::milliseconds timeout) {
  struct Completion {
    std::mutex mutex;
    std::condition_variable reached;
    bool done = false;
  };
  if (!future.completed()) {
    const auto completion = std::make_shared<Completion>();
    future.addCallback([completion](c10::ivalue::Future&) {
      const std::lock_guard lock(completion->mutex);
      completion->done = true;
      completion->reached.notify_one();
    });
    std::unique_lock lock(completion->mutex);
    const auto patience = base::Deadline::after(timeout).remaining();
    if (!completion->reached.wait_for(lock, patience, [&] { return completion->done; })) {
      throw Error(fmt::format("its future was not completed within the timeout of {} s",
                              std::chrono::duration<double>(timeout).count()));
    }
  }
  future.waitAndThrow();
}

}  // namespace

HookChannel::HookChannel(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Hook hook,
                         const std::vector<Bucket>& buckets, const Bucket& control,
                         const Describe& describe, std::uint32_t steps,
                         MakeGradBucket make_grad_bucket)
    : hook_(std::move(hook)),
      describe_(describe),
      make_grad_bucket_(std::move(make_grad_bucket)),
      timeout_(timeout_of(*group->getBackend(buckets.front().device.type()))),
      open_(buckets.size()),
      control_(distributed::make_bucket_channel(
          group, control.device.type(), {control},
          [describe, last = buckets.size()](std::size_t) { return describe(last); }, steps)) {
  for (const Bucket& bucket : buckets) {
    tensors_.push_back(allocate_tensor({bucket.count}, at::device(bucket.device).dtype(bucket.type),
                                       ProcessGroup(group)));
  }
}

const at::Tensor& HookChannel::tensor(std::size_t bucket) const {
  return bucket < tensors_.size() ? tensors_[bucket] : control_->tensor(0);
}

void HookChannel::begin_step(std::uint32_t forwards, std::optional<double> weight) {
  control_->begin_step(forwards, weight);
  open_.assign(tensors_.size(), {});
  next_ = 0;
}

void HookChannel::publish(std::size_t bucket) {
  if (bucket == tensors_.size()) return control_->publish(0);
  open_[bucket].published = true;
  run_hooks();
}

void HookChannel::skip(std::size_t bucket) {
  open_[bucket].skipped = true;
  run_hooks();
}

void HookChannel::run_hooks() {
  for (; next_ < open_.size(); ++next_) {
    Open& bucket = open_[next_];
    if (!bucket.published && !bucket.skipped) return;
    if (bucket.skipped) continue;
    guarded(next_, [&] {
      c10d::GradBucket grads = make_grad_bucket_(next_);
      bucket.result = hook_->runHook(grads);
      if (!bucket.result) throw Error("it returned a null future");
    });
  }
}

void HookChannel::finish() {
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t b = 0; b < open_.size(); ++b) {
    if (!open_[b].result) continue;
    guarded(b, [&] {
      await(*open_[b].result, timeout_);
      const at::Tensor result = hook_->parseHookResult(open_[b].result->value());
      if (result.numel() != tensors_[b].numel()) {
        throw Error(fmt::format("it gave {} elements for a bucket of {}", result.numel(),
                                tensors_[b].numel()));
      }
      if (result.data_ptr() != tensors_[b].data_ptr()) tensors_[b].copy_(result.view({-1}));
    });
    open_[b].result.reset();
  }
  control_->finish();
  waits_ = {{.bucket = -1, .rank = -1, .begin = begin, .end = std::chrono::steady_clock::now()}};
}

bool HookChannel::is_reduced(std::size_t bucket) const {
  if (bucket == tensors_.size()) return control_->is_reduced(0);
  if (bucket >= next_) return false;
  return !open_[bucket].result || open_[bucket].result->completed();
}

bool HookChannel::abandon_step() {
  if (!in_step()) return false;
  fail(
      fmt::format("an exception ended a backward of rank {} whose gradients a communication hook "
                  "reduces, so the hooks of the ranks do not match any more",
                  get_rank()));
}

// Errors of the hook's own are told to all ranks, which wait for it in vain; those about peers they
// have themselves.
template <typename Body>
void HookChannel::guarded(std::size_t bucket, Body&& body) {
  try {
    body();
  } catch (const PeerError&) {
    throw;
  } catch (...) {
    fail(fmt::format("the communication hook of rank {} failed for bucket {} ({}): {}", get_rank(),
                     bucket, describe_(bucket), distributed::current_exception_text()));
  }
}

}  // namespace paceline::ddp
