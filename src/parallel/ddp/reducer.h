#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/ddp.h>

#include "distributed/bucket_reducer.h"
#include "parallel/ddp/bucketing.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/parameter_claim.h"
#include "parallel/ddp/step_recorder.h"

namespace paceline::ddp {

// Averages gradients over the ranks during backward: autograd hooks copy each gradient into its
// bucket and publish buckets that are full; the final callback of the backward settles parameters
// without a gradient, finishes the reduction and leaves the averages in .grad.
//
// A step lasts from the first hook of a backward to its final callback. Autograd runs both on the
// thread that called backward, for gradients on the CPU; with a static graph, where backwards may
// be nested, on one thread at a time.
class Reducer {
 public:
  // `frozen`: parameters that are none of these. They have to stay so, and the same on all ranks.
  Reducer(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& frozen,
          const DdpOptions& options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  // Fixes whether backwards from here on are synchronised, and clears away a step that an exception
  // cut short: all gradients become zero then, as some have been averaged and others not. `counts`
  // says whether this forward is one that a backward must follow. After the first step of all, the
  // buckets are rebuilt here; then it is collective.
  void before_forward(bool synchronise, bool counts);
  // The ranks have met since before_forward, and the forward begins only now.
  void end_pre_forward_sync() { recorder_.end_pre_forward_sync(); }
  void after_forward() {
    if (records_) recorder_.end_forward();
  }
  // With a static graph, for each output of a forward: the backward that begins there is the
  // outermost, and the step ends with it.
  void watch_output(const at::Tensor& output);

  const DdpStats& stats() const { return recorder_.stats(); }

  // What this rank counts in the average of the next step; with nothing, all ranks count the same.
  void set_weight(std::optional<double> weight) { weight_ = weight; }
  // Replaces the reduction. Collective; before the first backward.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  // Says that the parameters are now the same on all ranks, however often each has changed them.
  void note_same_parameters();
  // What a backward does towards the other ranks, with gradients of zero. Those that there are stay
  // as they are, and leave the buckets.
  void main_hook();

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    bool sparse;             // its gradient is a sparse tensor, and lies in no bucket
    bool delayed;            // its gradient is reduced when the trigger's is
    at::Tensor bucket_view;  // its place in the bucket, in the parameter's shape
    at::Tensor view;  // where it is reduced in this step: there, or where autograd has put it
    c10::intrusive_ptr<torch::autograd::Node> accumulator;
    std::uintptr_t hook = 0;
    int expected = 1;    // gradients in a step; with a static graph, learnt in the first
    int arrived = 0;     // of them, in this step
    bool ready = false;  // in this step
    bool used = false;   // since the last synchronised step
  };
  // A tensor whose data may be exchanged by others.
  struct Watched {
    at::Tensor tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  using Indices = std::vector<std::size_t>;

  void make_plan(const Indices& order);
  c10::DeviceType device() const { return parameters_.front().tensor.device().type(); }
  // Whether gradients stay where autograd has put them: one rank checks what several do, but has
  // nobody to average with. Hooks get theirs nevertheless.
  bool is_alone() const { return ranks_ == 1 && !hook_; }
  bool uses_in_place() const;
  bool needs_bitmap() const;
  void make_bucket_reducer();
  void rebuild();
  void make_views();
  void attach_hook(std::size_t index);
  void renew_hooks();
  void check_frozen() const;
  void forget_gradients();

  void on_gradient(std::size_t index);
  void reduce_gradient(std::size_t index);
  void check_backward() const;
  void begin_step();
  void settle_never_used();
  shm::StepSummary summarise(bool joined);
  std::uint32_t count_modifications();
  void compare_parameters();
  void warn_if_never_called() const noexcept;
  void mark_ready(std::size_t index);
  void take_gradient(std::size_t index);
  bool use_gradient_in_place(std::size_t index);
  void return_in_place();
  void count_down(std::size_t bucket);
  void publish(std::size_t bucket);

  void finish_backward();
  void learn_graph();
  bool may_miss() const;
  Indices missing() const;
  void reduce_rest(const Indices& missing);
  std::vector<bool> skip_unused();
  void finish_buckets();
  void reduce_sparse();
  void put_back();
  void end_step();
  void fail_missing(const Indices& missing);
  void detach_from_failed();
  void detach_gradients();

  c10d::GradBucket grad_bucket(std::size_t index) const;
  std::string describe_bucket(std::size_t bucket) const;
  std::string names_of(const Indices& parameters) const;
  bool is_view(const Parameter& parameter) const;

  DdpOptions options_;
  int ranks_;
  ParameterClaim claim_;
  std::vector<Parameter> parameters_;
  std::vector<NamedTensor> frozen_;     // when the model was wrapped
  std::vector<Watched> watched_;        // all of both
  std::optional<std::size_t> trigger_;  // whose gradient lets those in delayed_ be reduced
  Indices delayed_;
  Indices order_;  // of all others in the plan
  BucketPlan plan_;
  bool bitmap_ = false;  // the bucket_reducer's last bucket tells which parameters were used
  std::unique_ptr<distributed::BucketReducer> bucket_reducer_;
  std::shared_ptr<c10d::CommHookInterface> hook_;
  Indices outstanding_;              // gradients still missing, by bucket
  Indices in_place_;                 // whose gradients are reduced where autograd has put them
  Indices arrivals_;                 // in the first step: the order in which parameters were ready
  std::vector<bool> used_;           // in the last step, as far as this rank needs to know
  std::vector<bool> used_anywhere_;  // with a static graph: learnt in the first step
  bool learning_ = true;             // the first step has yet to be finished
  bool rebuild_due_ = false;
  bool synchronise_ = false;
  bool records_ = false;  // the forward under way, or the last, is part of a step
  bool called_ = false;   // before_forward was
  std::uint32_t forwards_ = 0;
  std::uint32_t local_forwards_ = 0;
  std::vector<std::uint8_t> frozen_flags_;  // of parameters_, in the step under way
  std::uint32_t exchanges_ = 0;             // of a watched tensor's data
  std::uint32_t modifications_ = 0;         // at the last summary
  std::uint32_t same_parameters_ = 0;       // modifications_ when ranks had the same parameters
  std::optional<double> weight_;
  at::Tensor incoming_;  // what autograd gave for the gradient that has just come
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  StepRecorder recorder_;
  int backward_ = -1;  // autograd's number of the backward with which the step ends
};

}  // namespace paceline::ddp
