#include "distributed/devices/device_bucket_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include <paceline/error.h>

#include "distributed/translate.h"

namespace paceline::distributed {

DeviceBucketReducer::DeviceBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         c10::DeviceType device, const Options& options)
    : group_(group), sums_(options.sums) {
  if (std::ranges::any_of(options.buckets, &Bucket::skips)) {
    throw UsageError(
        "skip_all_reduce_unused_params: a model on an accelerator needs the backend paceline for "
        "it");
  }
  cpu_ =
      translate("DistributedDataParallel", [&] { return group->getBackend(c10::DeviceType::CPU); });
  Options host = options;
  host.buckets.clear();
  std::vector<Bucket> of_device;
  std::vector<std::size_t> numbers;
  for (std::size_t b = 0; b < options.buckets.size(); ++b) {
    const Bucket& bucket = options.buckets[b];
    on_host_.emplace_back();
    on_device_.emplace_back();
    if (bucket.device.is_cpu()) {
      on_host_[b] = host.buckets.size();
      host.buckets.push_back(bucket);
      numbers.push_back(b);
    } else {
      on_device_[b] = of_device.size();
      of_device.push_back(bucket);
    }
  }
  // A reducer has a bucket at least.
  if (host.buckets.empty()) {
    host.buckets.push_back({.count = 1, .type = at::kByte, .device = at::kCPU, .op = Op::max});
    numbers.push_back(options.buckets.size());
  }
  host.describe = [describe = options.describe, numbers,
                   last = options.buckets.size()](std::size_t bucket) {
    return numbers[bucket] == last ? "the end of the step" : describe(numbers[bucket]);
  };
  host_ = make_bucket_reducer(group, c10::DeviceType::CPU, host);
  std::vector<at::Tensor> reduced;
  for (std::size_t b = 0; b < options.buckets.size(); ++b) {
    const Bucket& bucket = options.buckets[b];
    if (on_host_[b]) {
      tensors_.push_back(host_->tensor(*on_host_[b]));
    } else {
      tensors_.push_back(at::zeros({bucket.count}, at::device(bucket.device).dtype(bucket.type)));
      reduced.push_back(tensors_.back());
    }
  }
  auto backend = translate("DistributedDataParallel", [&] { return group->getBackend(device); });
  works_.emplace(std::move(backend), std::move(of_device), std::move(reduced), options.sums);
}

void DeviceBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                     shm::FrozenFlags frozen) {
  std::optional<double> share;
  if (!sums_ && !weights.empty()) share = share_of(weights[0], *cpu_, group_, steps() + 1);
  HostedBucketReducer::begin_step(summary, weights, frozen);
  works_->begin_step(share);
}

void DeviceBucketReducer::publish(std::size_t bucket) {
  on_host_[bucket] ? host_->publish(*on_host_[bucket]) : works_->publish(*on_device_[bucket]);
}

void DeviceBucketReducer::skip(std::size_t /*bucket*/) {
  throw UsageError("buckets on an accelerator cannot be skipped over this backend");
}

void DeviceBucketReducer::finish() {
  if (std::ranges::none_of(on_host_, [](const auto& number) { return number.has_value(); })) {
    host_->publish(0);
  }
  host_->finish();
  works_->wait(group_);
}

bool DeviceBucketReducer::is_reduced(std::size_t bucket) const {
  return on_host_[bucket] ? host_->is_reduced(*on_host_[bucket])
                          : works_->is_reduced(*on_device_[bucket]);
}

bool DeviceBucketReducer::abort_step() {
  if (!in_step()) return false;
  works_->start_rest();
  const bool aborted = HostedBucketReducer::abort_step();
  works_->wait(group_);
  return aborted;
}

}  // namespace paceline::distributed
