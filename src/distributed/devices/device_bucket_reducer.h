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
// current stream wait. A rank that aborts a step takes part in its remaining calls.
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
  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> cpu_;
  bool sums_;
  std::vector<std::optional<std::size_t>> on_host_;    // the host's number of a bucket on the CPU
  std::vector<std::optional<std::size_t>> on_device_;  // works_' number of one on the accelerator
  std::optional<BucketWorks> works_;
};

}  // namespace paceline::distributed
