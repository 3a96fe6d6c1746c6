#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <paceline/distributed.h>

#include "base/idle_work.h"
#include "distributed/bucket_reducer.h"
#include "distributed/bucket_works.h"
#include "distributed/summary_comparison.h"

namespace paceline::distributed {

// Over any c10d::Backend: an asynchronous all-reduce for each bucket. A rank that aborts a step
// takes part in its remaining calls. The last bucket has one more row for each rank, which is zero
// on the others, so all ranks come to the same result.
class WorkBucketReducer final : public BucketReducer {
 public:
  WorkBucketReducer(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                    const Options& options);

  const at::Tensor& tensor(std::size_t bucket) const override { return tensors_[bucket]; }
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  bool in_step() const override { return in_step_; }
  std::uint32_t steps() const override { return step_; }
  void publish(std::size_t bucket) override { works_.publish(bucket); }
  void skip(std::size_t bucket) override { works_.skip(bucket); }
  void try_progress() override { base::do_idle_work(); }
  void finish() override;
  bool is_reduced(std::size_t bucket) const override { return works_.is_reduced(bucket); }
  const std::vector<Wait>& waits() const override { return waits_; }
  double share() const override { return share_; }
  bool modifications_differ() const override { return comparison_.modifications_differ(); }
  bool abort_step() override;
  bool failed() const override { return false; }  // each rank's memory is its own
  [[noreturn]] void fail(const std::string& text) override;
  [[noreturn]] void time_out(const std::string& text) override;

 private:
  at::Tensor own_row(const at::Tensor& rows) const { return rows[backend_->getRank()]; }
  void compare_early(const shm::StepSummary& summary);
  void compare_summaries(const at::Tensor& rows, std::uint32_t step);
  void wait_for_works();
  void check_nobody_aborted(const at::Tensor& rows);

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> reduced_;
  std::vector<at::Tensor> tensors_;  // without the rows
  at::Tensor rows_;
  SummaryComparison comparison_;
  bool compares_early_;
  shm::FrozenFlags frozen_;
  bool sums_;
  double share_;
  BucketWorks works_;
  std::uint32_t step_;
  bool in_step_ = false;
  bool aborted_ = false;  // by another rank, or by all because they differ
  std::vector<Wait> waits_;
};

}  // namespace paceline::distributed
