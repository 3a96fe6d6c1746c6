#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backends/paceline/gradient_memory.h"
#include "base/state_source.h"
#include "distributed/bucket_reducer.h"
#include "shm/buckets/bucket_reducer.h"

namespace paceline::backends {

// shm::BucketReducer with tensors.
class ShmBucketReducer final : public distributed::BucketReducer,
                               private distributed::InPlaceGradients {
 public:
  // `group`: of the ranks of this node. `between_nodes`: null if there is no other.
  ShmBucketReducer(shm::Group& group, const Options& options,
                   const std::shared_ptr<shm::SecondLevel>& between_nodes);

  const at::Tensor& tensor(std::size_t bucket) const override { return tensors_[bucket]; }
  const at::Tensor& part(std::size_t bucket, std::size_t part) const override {
    return part < parts_[bucket].size() ? parts_[bucket][part] : tensors_[bucket];
  }
  void begin_step(const shm::StepSummary& summary, Weights weights,
                  shm::FrozenFlags frozen) override {
    reducer_.begin_step(summary, weights, frozen);
  }
  bool in_step() const override { return reducer_.in_step(); }
  std::uint32_t steps() const override { return reducer_.steps(); }
  distributed::InPlaceGradients* in_place() override { return this; }
  void prepare_thread() override {
    reducer_.note_this_thread();
    gradients_.prefer();
  }
  void publish(std::size_t bucket) override { reducer_.publish(bucket); }
  void skip(std::size_t bucket) override { reducer_.skip(bucket); }
  bool is_reduced(std::size_t bucket) const override { return reducer_.is_reduced(bucket); }
  const std::vector<Wait>& waits() const override { return reducer_.waits(); }
  double share() const override { return reducer_.share(); }
  bool modifications_differ() const override { return reducer_.modifications_differ(); }
  void try_progress() override { reducer_.try_progress(); }
  void finish() override { reducer_.finish(); }
  bool abort_step() override { return reducer_.abort_step(); }
  bool failed() const override { return reducer_.failed(); }
  [[noreturn]] void fail(const std::string& text) override { reducer_.fail(text); }
  [[noreturn]] void time_out(const std::string& text) override {
    reducer_.fail(text, shm::FailureKind::timeout);
  }

 private:
  bool use(std::size_t bucket, std::size_t part, const at::Tensor& gradient) override {
    return reducer_.use_in_place(bucket, gradient.data_ptr(), part);
  }

  shm::BucketReducer reducer_;
  GradientMemory gradients_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::vector<at::Tensor>> parts_;  // by bucket, those with memory of their own
  base::StateSource source_;
};

}  // namespace paceline::backends
