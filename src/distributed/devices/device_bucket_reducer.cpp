#include "distributed/devices/device_bucket_reducer.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <fmt/format.h>

#include <algorithm>

#include "distributed/backend.h"
#include "distributed/devices/streams.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline::distributed {

DeviceBucketReducer::DeviceBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         c10::DeviceType device, const Options& options)
    : group_(group),
      sums_(options.sums),
      skips_(std::ranges::any_of(options.buckets, &Bucket::skips)),
      averaged_(options.averaged),
      aside_(new_stream(accelerator_of(options.buckets))) {
  cpu_ =
      translate("DistributedDataParallel", [&] { return group->getBackend(c10::DeviceType::CPU); });
  Options host = options;
  std::vector<Bucket> on_device;
  for (Bucket& bucket : host.buckets) {
    numbers_.emplace_back();
    if (bucket.device.is_cpu()) continue;
    numbers_.back() = on_device.size();
    on_device.push_back(bucket);
    bucket = {
        .count = 1, .type = at::kByte, .device = at::kCPU, .op = Op::max, .skips = bucket.skips};
  }
  const std::size_t end = host.buckets.size();
  host.buckets.push_back({.count = 1, .type = at::kByte, .device = at::kCPU, .op = Op::max});
  host.describe = [describe = options.describe, end](std::size_t bucket) {
    return bucket == end ? "the end of the step" : describe(bucket);
  };
  host_ = make_bucket_reducer(group, host);
  std::vector<at::Tensor> reduced;
  for (const Bucket& bucket : on_device) {
    reduced.push_back(at::zeros({bucket.count}, at::device(bucket.device).dtype(bucket.type)));
  }
  for (std::size_t b = 0; b < numbers_.size(); ++b) {
    tensors_.push_back(numbers_[b] ? reduced[*numbers_[b]] : host_->tensor(b));
  }
  auto backend = translate("DistributedDataParallel", [&] { return group->getBackend(device); });
  works_.emplace(std::move(backend), std::move(on_device), std::move(reduced), options.sums);
}

void DeviceBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                     shm::FrozenFlags frozen) {
  std::optional<double> share;
  if (!sums_ && !weights.empty()) share = share_of(weights[0], *cpu_, group_, steps() + 1);
  HostedBucketReducer::begin_step(summary, weights, frozen);
  works_->begin_step(share);
  failure_ = nullptr;
}

template <typename Call>
void DeviceBucketReducer::try_call(Call&& call) noexcept {
  if (failure_) return;
  try {
    call();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void DeviceBucketReducer::publish(std::size_t bucket) {
  if (numbers_[bucket]) try_call([&] { works_->publish(*numbers_[bucket]); });
  host_->publish(bucket);
}

void DeviceBucketReducer::skip(std::size_t bucket) {
  if (numbers_[bucket]) try_call([&] { works_->skip(*numbers_[bucket]); });
  host_->skip(bucket);
}

void DeviceBucketReducer::finish() {
  if (failure_ && !has_host_failed()) throw_failure();
  host_->publish(tensors_.size());
  host_->finish();
  if (failure_) std::rethrow_exception(failure_);
  if (averaged_) note_averages();
  works_->wait(group_);
  note_stream();
}

bool DeviceBucketReducer::has_host_failed() const {
  const auto* const ours = dynamic_cast<const ExtendedBackend*>(cpu_.get());
  return ours != nullptr && ours->has_failed();
}

// The other ranks must not finish the step.
void DeviceBucketReducer::throw_failure() {
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception&) {
    host_->fail(fmt::format("rank {} cannot reduce its gradients: {}",
                            global_rank_of(group_, get_rank(group_)), current_exception_text()));
    __builtin_unreachable();  // GCC 12 ignores noreturn on a virtual function
  }
}

// The current stream may still have the backward to run.
void DeviceBucketReducer::note_averages() {
  const c10::StreamGuard guard(aside_);
  for (std::size_t b = 0; b < tensors_.size(); ++b) {
    if (!numbers_[b]) continue;
    works_->wait(group_, *numbers_[b]);
    averaged_(b, aside_);
  }
}

bool DeviceBucketReducer::abort_step() {
  if (!in_step()) return false;
  if (failure_ && !has_host_failed()) throw_failure();
  if (skips_ && !works_->all_started()) {
    host_->fail(fmt::format(
        "an exception ended a backward of rank {}: over this backend, a step with "
        "skip_all_reduce_unused_params cannot be aborted, since it is unknown which buckets the "
        "other ranks skip",
        global_rank_of(group_, get_rank(group_))));
  }
  try_call([&] { works_->start_rest(); });
  const bool aborted = HostedBucketReducer::abort_step();
  try_call([&] { works_->wait(group_); });
  return aborted;
}

}  // namespace paceline::distributed
