#include "distributed/devices/device_bucket_reducer.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include <paceline/error.h>

#include "distributed/devices/streams.h"
#include "distributed/translate.h"

namespace paceline::distributed {

DeviceBucketReducer::DeviceBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         c10::DeviceType device, const Options& options)
    : group_(group),
      sums_(options.sums),
      averaged_(options.averaged),
      aside_(new_stream(accelerator_of(options.buckets))) {
  if (std::ranges::any_of(options.buckets, &Bucket::skips)) {
    throw UsageError(
        "skip_all_reduce_unused_params: a model on an accelerator needs the backend paceline for "
        "it");
  }
  cpu_ =
      translate("DistributedDataParallel", [&] { return group->getBackend(c10::DeviceType::CPU); });
  Options host = options;
  std::vector<Bucket> on_device;
  for (Bucket& bucket : host.buckets) {
    numbers_.emplace_back();
    if (bucket.device.is_cpu()) continue;
    numbers_.back() = on_device.size();
    on_device.push_back(bucket);
    bucket = {.count = 1, .type = at::kByte, .device = at::kCPU, .op = Op::max};
  }
  const std::size_t end = host.buckets.size();
  host.buckets.push_back({.count = 1, .type = at::kByte, .device = at::kCPU, .op = Op::max});
  host.describe = [describe = options.describe, end](std::size_t bucket) {
    return bucket == end ? "the end of the step" : describe(bucket);
  };
  host_ = make_bucket_reducer(group, c10::DeviceType::CPU, host);
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
}

void DeviceBucketReducer::publish(std::size_t bucket) {
  if (numbers_[bucket]) works_->publish(*numbers_[bucket]);
  host_->publish(bucket);
}

void DeviceBucketReducer::skip(std::size_t /*bucket*/) {
  throw UsageError("buckets on an accelerator cannot be skipped over this backend");
}

void DeviceBucketReducer::finish() {
  host_->publish(tensors_.size());
  host_->finish();
  if (averaged_) note_averages();
  works_->wait(group_);
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

bool DeviceBucketReducer::is_reduced(std::size_t bucket) const {
  return numbers_[bucket] ? works_->is_reduced(*numbers_[bucket]) : host_->is_reduced(bucket);
}

bool DeviceBucketReducer::abort_step() {
  if (!in_step()) return false;
  works_->start_rest();
  const bool aborted = HostedBucketReducer::abort_step();
  works_->wait(group_);
  return aborted;
}

}  // namespace paceline::distributed
