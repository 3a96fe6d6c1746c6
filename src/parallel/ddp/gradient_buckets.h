#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/ddp_options.h>

#include "distributed/bucket_reducer.h"
#include "parallel/ddp/bucketing.h"
#include "parallel/ddp/gradient_sums.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/step_recorder.h"

namespace paceline::ddp {

// The buckets of a model's gradients: where each gradient is in them, how it gets there, and how
// the average becomes .grad. A bucket is published when it is full.
//
// A step runs: begin_step; add or leave_out for each dense parameter, or skip for a bucket of them;
// finish; end_step.
//
// With logical ranks, each of them is a leaf of the sum. A step begins with begin_leaf, add or
// leave_out for each dense parameter, for each leaf of this rank but the last. Then it runs as
// above, after another begin_leaf.
class GradientBuckets {
 public:
  // Buckets hold all dense parameters, `delayed` ones last. With `exchanges_usage`, ranks exchange
  // in one more bucket which parameters they used. `parameters` and `recorder` must outlive this.
  // Collective.
  GradientBuckets(const std::vector<NamedTensor>& parameters, const DdpOptions& options,
                  const std::vector<bool>& delayed, bool exchanges_usage, StepRecorder& recorder);
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // Replaces the reduction. Collective.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  // Rebuilds the buckets in the order in which gradients were ready on rank 0 in the first step.
  // Collective.
  void reorder(bool exchanges_usage);

  const BucketPlan& plan() const { return plan_; }
  distributed::BucketReducer& reducer() { return *bucket_reducer_; }
  // Whether gradients stay where autograd allocated them, since a single rank averages with no
  // other. Its checks are those of several ranks. Hooks still get buckets.
  bool keeps_gradients_in_place() const { return ranks_ == 1 && !hook_ && !sums_; }

  const shm::LeafPlan& leaves() const { return leaves_; }
  // Sets the leaves of each rank, between steps. Collective.
  void set_leaves(std::vector<shm::LeafRange> ranges);
  // Forgets the leaves of a step that is not finished. `.grad` is what the next leaves start from.
  void begin_leaves();
  // If a step is not finished: makes .grad what it was in begin_leaves.
  void leave_leaves();
  // `leaf`: of this rank, from 0.
  void begin_leaf(int leaf);
  // The weight of the current leaf in the average; 1 if it is not set.
  void set_leaf_weight(double weight) { leaf_weight_ = weight; }
  bool is_last_leaf() const { return leaf_ + 1 == count_leaves(); }
  using Weights = distributed::BucketReducer::Weights;
  // `weights`: of this rank's leaves.
  void begin_step(const shm::StepSummary& summary, Weights weights, shm::FrozenFlags frozen);
  // The parameter's gradient is ready. Adds zeros if it has none. `arrived`: it came in this step,
  // from `incoming` if that is known.
  void add(std::size_t parameter, bool arrived, const at::Tensor& incoming);
  // The parameter gets no gradient on any rank.
  void leave_out(std::size_t parameter);
  // Skips the flagged buckets, except the reducer's last, which may also carry the summary. Returns
  // the flags of the skipped ones.
  std::vector<bool> skip(std::vector<bool> buckets);
  // For a rank that has no gradients in a step of the others.
  void add_zeros();
  // Waits for the other ranks. `used`: the parameters that this rank used. With an exchange of
  // usage, returns the parameters that any rank used.
  std::optional<std::vector<bool>> finish(const std::vector<bool>& used);
  // Copies the averages of the `used` dense parameters into .grad, for gradients that are not views
  // into buckets.
  void put_back(const std::vector<bool>& used);
  // Call at the end of a finished step.
  void end_step();
  // Undoes use_in_place for all gradients. Call at the end of every step, finished or aborted.
  void reset_in_place();

  // After an aborted step, in which only some gradients were averaged: zeroes dense gradients and
  // removes sparse ones.
  void forget_gradients();
  // The parameter's .grad, such that later steps do not change it.
  at::Tensor kept_gradient(std::size_t parameter) const;
  // Replaces each .grad that is a view into a bucket by a copy.
  void detach();
  // If the reducer has failed: a rank that wakes up late may still write into the buckets.
  void detach_from_failed();

 private:
  struct Views {
    at::Tensor in_bucket;  // the gradient's place there, in the parameter's shape
    at::Tensor current;    // where this step reduces it: there, or where autograd allocated it
    std::vector<at::Tensor> parts{};  // its place in each part, where leaves are added up
  };

  void make(const Indices& order, bool exchanges_usage);
  void make_plan(const Indices& order);
  bool needs_exchange(bool wanted) const;
  void make_bucket_reducer();
  void make_views();
  bool can_use_in_place() const;
  bool uses_in_place() const;
  shm::LeafPlan::Parts parts_of_leaves() const;
  bool is_view(std::size_t parameter) const;
  void take_gradient(std::size_t parameter, bool arrived, const at::Tensor& incoming);
  bool use_in_place(std::size_t parameter, const at::Tensor& incoming);
  int count_leaves() const { return leaves_.range(rank_).count; }
  void add_to_sum(std::size_t parameter, const at::Tensor& incoming);
  void take_sums(std::size_t parameter);
  void count_down(std::size_t bucket);
  void publish(std::size_t bucket);
  std::size_t bytes_of(std::size_t bucket) const;
  c10d::GradBucket grad_bucket(std::size_t bucket) const;
  std::string describe(std::size_t bucket) const;

  const std::vector<NamedTensor>& parameters_;
  DdpOptions options_;
  int ranks_;
  int rank_;
  StepRecorder& recorder_;
  shm::LeafPlan leaves_;
  int leaf_ = 0;  // the current one
  double leaf_weight_ = 1;
  std::optional<GradientSums> sums_;  // where a rank has several leaves
  std::vector<at::Tensor> initial_;   // by parameter: .grad before the first leaf
  std::vector<at::Tensor> held_;      // sums that are reduced in place, until the step ends
  Indices order_;                     // of the parameters in the plan, without delayed_
  Indices delayed_;                   // of dense parameters
  BucketPlan plan_;
  bool exchanges_usage_ = false;  // the reducer's last bucket is for that
  std::shared_ptr<c10d::CommHookInterface> hook_;
  // By parameter; empty for one without a bucket. Outlives the bucket reducer, which retires memory
  // that peers may still write to only while it is allocated.
  std::vector<Views> views_;
  std::unique_ptr<distributed::BucketReducer> bucket_reducer_;
  Indices outstanding_;   // gradients still missing, by bucket
  Indices in_place_;      // whose gradients are reduced where autograd allocated them
  Indices arrivals_;      // of order_, as they were ready in the first step
  bool is_first_ = true;  // the first step has yet to be finished
};

}  // namespace paceline::ddp
