#include "parallel/comm_hooks/hook_bucket_reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <numeric>
#include <string_view>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/deadline.h"
#include "base/idle_work.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"
#include "parallel/comm_hooks/running_hook.h"
#include "parallel/with_error_context.h"

namespace paceline::comm_hooks {
namespace {

std::chrono::milliseconds timeout_of(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions()->timeout;
  } catch (const c10::Error&) {  // it has none
    return kBackendDefaultTimeout;
  }
}

// How often a wait for a future checks the peers.
constexpr std::chrono::milliseconds kLook{10};
// A wait is longer by this than the waits that may cause it, since their errors say more.
constexpr std::chrono::seconds kReportTime{1};
// The prefix of failures that every rank throws.
constexpr const char* kHookOfRank = "the communication hook of rank";

// Waits for a future with a time limit.
class Completion {
 public:
  explicit Completion(c10::ivalue::Future& future) {
    future.addCallback([state = state_](c10::ivalue::Future&) {
      const std::lock_guard lock(state->mutex);
      state->done = true;
      state->reached.notify_one();
    });
  }
  bool wait_for(std::chrono::milliseconds limit) const {
    std::unique_lock lock(state_->mutex);
    return base::wait_until(state_->reached, lock, base::Deadline::after(limit),
                            [&] { return state_->done; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable reached;
    bool done = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace

HookBucketReducer::HookBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Hook hook,
                                     const Options& options, MakeInput make_input)
    : group_(group),
      hook_(std::move(hook)),
      describe_(options.describe),
      make_input_(std::move(make_input)),
      timeout_(timeout_of(*group->getBackend(options.buckets.back().device.type()))),
      one_at_a_time_(dynamic_cast<const OneBucketAtATime*>(hook_.get()) != nullptr),
      all_ranks_(static_cast<std::size_t>(group->getSize())),
      open_(options.buckets.size() - 1) {
  const Bucket& control = options.buckets.back();
  backend_ = c10::dynamic_intrusive_pointer_cast<distributed::ExtendedBackend>(
      group->getBackend(control.device.type()));
  Options of_control = options;
  of_control.buckets = {control};
  of_control.describe = [describe = describe_, last = open_.size()](std::size_t) {
    return describe(last);
  };
  // A rank whose hook is late reports the bucket itself.
  of_control.extra_time = 2 * kReportTime;
  control_ = distributed::make_bucket_reducer(group, of_control);
  std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  for (std::size_t b = 0; b < open_.size(); ++b) {
    const Bucket& bucket = options.buckets[b];
    tensors_.push_back(
        allocate_tensor({bucket.count}, at::device(bucket.device).dtype(bucket.type), group_));
  }
}

int HookBucketReducer::own_rank() const {
  return distributed::global_rank_of(group_, get_rank(group_));
}

const at::Tensor& HookBucketReducer::tensor(std::size_t bucket) const {
  return bucket < tensors_.size() ? tensors_[bucket] : control_->tensor(0);
}

void HookBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                   shm::FrozenFlags frozen) {
  control_->begin_step(summary, weights, frozen);
  open_.assign(tensors_.size(), {});
  next_ = 0;
  after_last_.clear();
}

void HookBucketReducer::publish(std::size_t bucket) {
  if (bucket == tensors_.size()) {
    if (backend_) control_->publish(0);
    return;
  }
  open_[bucket].published = true;
  run_hooks();
}

void HookBucketReducer::skip(std::size_t bucket) {
  open_[bucket].skipped = true;
  run_hooks();
}

void HookBucketReducer::try_progress() {
  control_->try_progress();
  run_hooks();
}

void HookBucketReducer::run_hooks() {
  for (; next_ < open_.size(); ++next_) {
    Open& bucket = open_[next_];
    if (!bucket.published && !bucket.skipped) return;
    if (one_at_a_time_ && next_ > 0 && !is_reduced(next_ - 1)) return;
    if (bucket.skipped) continue;
    guarded(next_, [&] {
      Input input = make_input_(next_);
      const RunningHook running(
          group_, input.parameters,
          [this](std::function<void()> body) { after_last_.emplace_back(next_, std::move(body)); },
          models_may_differ_);
      bucket.result = hook_->runHook(input.bucket);
      if (!bucket.result) throw Error("it returned a null future");
    });
  }
}

void HookBucketReducer::finish() {
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& [bucket, body] : after_last_) guarded(bucket, body);
  for (std::size_t b = 0; b < open_.size(); ++b) {
    run_hooks();
    if (!open_[b].result) continue;
    await(b);
    guarded(b, [&] {
      open_[b].result->waitAndThrow();
      const at::Tensor result = hook_->parseHookResult(open_[b].result->value());
      if (result.numel() != tensors_[b].numel()) {
        throw Error(fmt::format("it gave {} elements for a bucket of {}", result.numel(),
                                tensors_[b].numel()));
      }
      if (result.data_ptr() != tensors_[b].data_ptr()) tensors_[b].copy_(result.view({-1}));
    });
    open_[b].result.reset();
  }
  // Not earlier: callbacks of the futures may have made calls until here, and other backends match
  // calls of a group by their order, also the calls of `control`.
  if (!backend_) control_->publish(0);
  control_->finish();
  waits_ = {{.bucket = -1, .rank = -1, .begin = begin, .end = std::chrono::steady_clock::now()}};
}

// Returns once the bucket's future is completed. It may depend on calls of the group, which have
// their own timeouts and name the missing rank, so the time counts from the end of the last call.
// Calls made later than one timeout after the end of the backward do not count.
void HookBucketReducer::await(std::size_t bucket) {
  c10::ivalue::Future& future = *open_[bucket].result;
  if (future.completed()) return;
  const Completion completion(future);
  const auto timeout = base::Deadline::after(timeout_).remaining() + kReportTime;
  auto deadline = base::Deadline::after(timeout);
  const auto last_call = deadline;
  std::uint64_t calls = 0;
  while (!completion.wait_for(kLook)) {
    if (backend_ && !last_call.expired()) calls = backend_->call_count();
    if (backend_ && backend_->is_busy_with(calls)) {
      deadline = base::Deadline::after(timeout);
      continue;
    }
    try {
      if (backend_) backend_->check_peers(all_ranks_, {"backward", steps()});
    } catch (const PeerError&) {
      if (completion.wait_for(kReportTime)) return;
      throw;
    }
    if (!deadline.expired()) continue;
    control_->time_out(fmt::format(
        "{} {} has not completed its future for bucket {} ({}) within the timeout of {} s{}: every "
        "future must be completed, by setError if its hook fails",
        kHookOfRank, own_rank(), bucket, describe_(bucket),
        std::chrono::duration<double>(timeout_).count(),
        backend_ ? ", and no call that it may depend on is under way there" : ""));
  }
}

bool HookBucketReducer::is_reduced(std::size_t bucket) const {
  if (bucket == tensors_.size()) return control_->is_reduced(0);
  if (bucket >= next_) return false;
  return !open_[bucket].result || open_[bucket].result->completed();
}

bool HookBucketReducer::abort_step() {
  if (!in_step()) return false;
  fail(
      fmt::format("an exception ended a backward of rank {} whose gradients a communication hook "
                  "reduces, so the hooks of the ranks do not match any more",
                  own_rank()));
}

// Sends the hook's own errors to all ranks, which wait for it. The other ranks get errors about
// peers themselves, in the same bucket's collective.
template <typename Body>
void HookBucketReducer::guarded(std::size_t bucket, Body&& body) {
  try {
    body();
  } catch (const PeerError& error) {
    if (std::string_view(error.what()).starts_with(kHookOfRank))
      throw;  // has the full text on every rank
    parallel::with_error_context(
        fmt::format("running the communication hook for bucket {} ({})", bucket, describe_(bucket)),
        [] { throw; });
  } catch (...) {
    // Calls on an accelerator fail without the rank that was lost.
    if (backend_ && backend_->has_failed()) backend_->check_peers({}, {"backward", steps()});
    const std::string text = distributed::current_exception_text();
    if (!backend_) {  // perhaps an error of a call in the hook, which another rank has caused
      fail(fmt::format("running the communication hook for bucket {} ({}) on rank {}: {}", bucket,
                       describe_(bucket), own_rank(), text));
    }
    fail(fmt::format("{} {} failed for bucket {} ({}): {}", kHookOfRank, own_rank(), bucket,
                     describe_(bucket), text));
  }
}

}  // namespace paceline::comm_hooks
