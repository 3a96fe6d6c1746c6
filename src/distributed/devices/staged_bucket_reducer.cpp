#include "distributed/devices/staged_bucket_reducer.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <exception>
#include <thread>

#include "distributed/devices/streams.h"

namespace paceline::distributed {

StagedBucketReducer::StagedBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const Options& options)
    : to_host_(new_stream(accelerator_of(options.buckets))),
      to_device_(new_stream(to_host_.device())),
      averaged_(options.averaged),
      returned_(to_host_.device_type()) {
  Options host = options;
  host.staged = true;
  for (Bucket& bucket : host.buckets) {
    bucket.device = at::kCPU;
    bucket.in_place = false;
  }
  host_ = make_bucket_reducer(group, host);
  for (std::size_t b = 0; b < options.buckets.size(); ++b) {
    const Bucket& bucket = options.buckets[b];
    arrived_.emplace_back(to_host_.device_type());
    if (bucket.device.is_cpu()) {
      tensors_.push_back(host_->tensor(b));
      parts_.push_back({tensors_[b]});
      continue;
    }
    tensors_.push_back(at::zeros({bucket.count}, at::device(bucket.device).dtype(bucket.type)));
    pinned_.emplace_back(host_->tensor(b));
    const bool has_parts = options.leaves && bucket.op == Op::average;
    add_parts(has_parts ? options.leaves->parts(group->getRank()).size() : 1);
  }
}

// Of the bucket that was added last.
void StagedBucketReducer::add_parts(std::size_t count) {
  const std::size_t bucket = parts_.size();
  const at::Tensor& tensor = tensors_[bucket];
  auto& parts = parts_.emplace_back();
  for (std::size_t p = 0; p < count; ++p) {
    const at::Tensor& of_host = host_->part(bucket, p);
    if (of_host.is_alias_of(host_->tensor(bucket))) {
      parts.push_back(tensor);
    } else {
      parts.push_back(at::zeros_like(of_host, tensor.options().dtype(of_host.scalar_type())));
      pinned_.emplace_back(of_host);
    }
  }
}

StagedBucketReducer::~StagedBucketReducer() {
  wait_for_copies();
}

void StagedBucketReducer::begin_step(const shm::StepSummary& summary, Weights weights,
                                     shm::FrozenFlags frozen) {
  HostedBucketReducer::begin_step(summary, weights, frozen);
  copying_.clear();
  reducing_.clear();
  copied_back_.assign(tensors_.size(), false);
}

void StagedBucketReducer::publish(std::size_t bucket) {
  if (!is_staged(bucket)) return host_->publish(bucket);
  c10::Event ready(to_host_.device_type());
  ready.record(current_stream(to_host_.device()));
  ready.block(to_host_);
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(to_host_);
  for (std::size_t p = 0; p < parts_[bucket].size(); ++p) {
    host_->part(bucket, p).copy_(parts_[bucket][p], /*non_blocking=*/true);
  }
  arrived_[bucket].record(to_host_);
  copying_.push_back(bucket);
}

void StagedBucketReducer::try_progress() {
  while (!copying_.empty() && arrived_[copying_.front()].query()) {
    host_->publish(copying_.front());
    reducing_.push_back(copying_.front());
    copying_.pop_front();
  }
  host_->try_progress();
  copy_back_reduced();
}

void StagedBucketReducer::copy_back_reduced() {
  while (!reducing_.empty() && host_->is_reduced(reducing_.front())) {
    copy_back(reducing_.front());
    reducing_.pop_front();
  }
}

void StagedBucketReducer::copy_back(std::size_t bucket) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard guard(to_device_);
  tensors_[bucket].copy_(host_->tensor(bucket), /*non_blocking=*/true);
  copied_back_[bucket] = true;
  if (averaged_) averaged_(bucket, to_device_);
}

void StagedBucketReducer::finish() {
  while (!copying_.empty()) {
    try_progress();
    std::this_thread::yield();
  }
  host_->finish();
  for (; !reducing_.empty(); reducing_.pop_front()) copy_back(reducing_.front());
  returned_.record(to_device_);
  returned_.block(current_stream(to_device_.device()));
  note_stream();
}

bool StagedBucketReducer::is_reduced(std::size_t bucket) const {
  return is_staged(bucket) ? copied_back_[bucket] : host_->is_reduced(bucket);
}

bool StagedBucketReducer::abort_step() {
  wait_for_copies();
  return HostedBucketReducer::abort_step();
}

// The host's memory is about to be used for something else, or freed.
void StagedBucketReducer::wait_for_copies() const noexcept {
  try {
    to_host_.synchronize();
    to_device_.synchronize();
  } catch (const std::exception&) {
    // The accelerator has failed, and copies no more.
  }
}

}  // namespace paceline::distributed
