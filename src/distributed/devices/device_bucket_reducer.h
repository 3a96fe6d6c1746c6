#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <vector>

#include <paceline/distributed.h>

#include "distributed/bucket_works.h"
#include "distributed/devices/hosted_bucket_reducer.h"

namespace paceline::distributed {

// For a backend that takes tensors on an accelerator: NCCL. An asynchronous all-reduce for each
// bucket, on the backend's stream. No call waits for the accelerator: `finish` only makes the
// current stream wait. A rank that aborts a step takes part in its remaining calls. The host
// reduces a byte for each of these buckets, so that its errors name the bucket that a rank lacks,
// and one in `finish`, so that no rank finishes a step that another one aborts.
class DeviceBucketReducer final : public HostedBucketReducer {
 public:
  // Throws UsageError for buckets that ranks may skip. Collective.
  DeviceBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device,
                      const Options& options);

  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  void publish(std::size_t bucket) override;
  // Throws UsageError.
  void skip(std::size_t bucket) override;
  void try_progress() override { host_->try_progress(); }
  void finish() override;
  bool is_reduced(std::size_t bucket) const override;
  bool abort_step() override;

 private:
  void note_averages();

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> cpu_;
  bool sums_;
  std::vector<std::optional<std::size_t>> numbers_;  // in works_, of buckets on the accelerator
  std::optional<BucketWorks> works_;
  std::function<void(std::size_t, const c10::Stream&)> averaged_;
  c10::Stream aside_;  // waits for each bucket by itself
};

}  // namespace paceline::distributed
