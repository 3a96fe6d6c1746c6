#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
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
//
// A call of NCCL throws once the group has been aborted (FailureWatch). The step goes on then, so
// that the host says which rank is at fault. After any other error of NCCL, the host fails the step
// on all ranks.
class DeviceBucketReducer final : public HostedBucketReducer {
 public:
  // Collective.
  DeviceBucketReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device,
                      const Options& options);

  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  void publish(std::size_t bucket) override;
  void skip(std::size_t bucket) override;
  void try_progress() override { host_->try_progress(); }
  void finish() override;
  // For the CPU: it does not wait until the accelerator has the average.
  bool is_reduced(std::size_t bucket) const override { return host_->is_reduced(bucket); }
  bool abort_step() override;

 private:
  template <typename Call>
  void try_call(Call&& call) noexcept;
  bool has_host_failed() const;
  [[noreturn]] void throw_failure();
  void note_averages();

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> cpu_;
  bool sums_;
  bool skips_;
  std::vector<std::optional<std::size_t>> numbers_;  // in works_, of buckets on the accelerator
  std::optional<BucketWorks> works_;
  std::function<void(std::size_t, const c10::Stream&)> averaged_;
  std::exception_ptr failure_;  // of a call in this step
  c10::Stream aside_;           // waits for each bucket by itself
};

}  // namespace paceline::distributed
