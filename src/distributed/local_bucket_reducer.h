#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include <paceline/distributed.h>

#include "distributed/bucket_reducer.h"

namespace paceline::distributed {

// For a group of one rank: checks the order of a step and throws its errors, but reduces nothing.
// It needs no backend, so gradients may be on any device.
class LocalBucketReducer final : public BucketReducer {
 public:
  LocalBucketReducer(ProcessGroup group, const Options& options);

  // Made at the first request: gradients of a single rank need not be in buckets.
  const at::Tensor& tensor(std::size_t bucket) const override;
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  bool in_step() const override { return in_step_; }
  std::uint32_t steps() const override { return step_; }
  void publish(std::size_t bucket) override { ready_[bucket] = true; }
  void skip(std::size_t bucket) override { ready_[bucket] = true; }
  void try_progress() override {}
  void finish() override { in_step_ = false; }
  bool is_reduced(std::size_t bucket) const override { return ready_[bucket]; }
  const std::vector<Wait>& waits() const override { return waits_; }
  double share() const override { return 1; }
  bool modifications_differ() const override { return false; }
  bool abort_step() override { return std::exchange(in_step_, false); }
  bool failed() const override { return false; }
  [[noreturn]] void fail(const std::string& text) override;
  [[noreturn]] void time_out(const std::string& text) override;

 private:
  ProcessGroup group_;
  std::vector<Bucket> buckets_;
  mutable std::vector<at::Tensor> tensors_;
  std::vector<bool> ready_;  // published or skipped in this step
  std::vector<Wait> waits_;  // none
  std::uint32_t step_;
  bool in_step_ = false;
};

}  // namespace paceline::distributed
