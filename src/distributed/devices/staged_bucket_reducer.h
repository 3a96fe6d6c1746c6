#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>
#include <vector>

#include "distributed/devices/hosted_bucket_reducer.h"
#include "distributed/devices/pinned_memory.h"

namespace paceline::distributed {

// For backends that take CPU tensors only, and for sums over leaves: each bucket on the accelerator
// is copied to one of the host, and its average back, on streams beside the backward. The host's
// buckets are pinned, and the copies are asynchronous.
//
// The hooks of a backward run ahead of the accelerator, so most of the work is done in `finish`:
// while the backward still runs on the accelerator, it publishes each bucket whose copy has
// arrived. It returns when the averages are on their way.
class StagedBucketReducer final : public HostedBucketReducer {
 public:
  // Collective.
  StagedBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options);
  StagedBucketReducer(const StagedBucketReducer&) = delete;
  StagedBucketReducer& operator=(const StagedBucketReducer&) = delete;
  ~StagedBucketReducer() override;

  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  const at::Tensor& part(std::size_t bucket, std::size_t part) const override {
    return parts_[bucket][part];
  }
  void publish(std::size_t bucket) override;
  void skip(std::size_t bucket) override { host_->skip(bucket); }
  void try_progress() override;
  void finish() override;
  bool is_reduced(std::size_t bucket) const override;
  bool abort_step() override;

 private:
  bool is_staged(std::size_t bucket) const { return !tensors_[bucket].is_cpu(); }
  void add_parts(std::size_t count);
  void copy_back_reduced();
  void copy_back(std::size_t bucket);
  void wait_for_copies() const noexcept;

  std::vector<std::vector<at::Tensor>> parts_;  // on the accelerator, by bucket
  std::vector<PinnedMemory> pinned_;            // the host's buckets and their parts
  c10::Stream to_host_;
  c10::Stream to_device_;
  std::function<void(std::size_t, const c10::Stream&)> averaged_;
  std::vector<c10::Event> arrived_;     // by bucket: its copy is on the host
  c10::Event returned_;                 // all averages of the step are on the accelerator
  std::deque<std::size_t> copying_{};   // to the host, in order
  std::deque<std::size_t> reducing_{};  // published and not yet copied back
  std::vector<bool> copied_back_;       // by bucket
};

}  // namespace paceline::distributed
