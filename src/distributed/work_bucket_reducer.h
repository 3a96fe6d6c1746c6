#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <paceline/distributed.h>

#include "distributed/bucket_reducer.h"
#include "distributed/summary_comparison.h"

namespace paceline::distributed {

// Over any c10d::Backend: an asynchronous all-reduce for each bucket. A backend matches calls by
// their order, so buckets start in ascending order, in any order of publication, and a rank that
// aborts a step takes part in its remaining calls. The last bucket has one more row for each rank,
// which is zero on the others, so all ranks come to the same result.
class WorkBucketReducer final : public BucketReducer {
 public:
  WorkBucketReducer(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                    const Options& options);

  const at::Tensor& tensor(std::size_t bucket) const override { return tensors_[bucket]; }
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override;
  bool in_step() const override { return in_step_; }
  std::uint32_t steps() const override { return step_; }
  void publish(std::size_t bucket) override { settle(bucket, State::published); }
  void skip(std::size_t bucket) override { settle(bucket, State::skipped); }
  void try_progress() override {}
  void finish() override;
  bool is_reduced(std::size_t bucket) const override {
    return bucket < works_.size() && (!works_[bucket] || works_[bucket]->isCompleted());
  }
  const std::vector<Wait>& waits() const override { return waits_; }
  double share() const override { return share_; }
  bool modifications_differ() const override { return comparison_.modifications_differ(); }
  bool abort_step() override;
  bool failed() const override { return false; }  // each rank's memory is its own
  [[noreturn]] void fail(const std::string& text) override;
  [[noreturn]] void time_out(const std::string& text) override;

 private:
  enum class State { open, published, skipped };

  double total_of(double weight);
  at::Tensor own_row(const at::Tensor& rows) const { return rows[backend_->getRank()]; }
  void compare_early(const shm::StepSummary& summary);
  void compare_summaries(const at::Tensor& rows, std::uint32_t step);
  void settle(std::size_t bucket, State state);
  void start();
  void scale(const at::Tensor& tensor) const;
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
  std::vector<State> state_;
  bool sums_;
  double share_;
  bool weighted_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::uint32_t step_;
  bool in_step_ = false;
  bool aborted_ = false;  // by another rank, or by all because they differ
  std::vector<Wait> waits_;
};

}  // namespace paceline::distributed
