#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/ddp_options.h>
#include <paceline/ddp_stats.h>

#include "parallel/ddp/delayed_parameters.h"
#include "parallel/ddp/earlier_sums.h"
#include "parallel/ddp/gradient_buckets.h"
#include "parallel/ddp/gradient_hooks.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/parameter_claim.h"
#include "parallel/ddp/sparse_gradients.h"
#include "parallel/ddp/static_graph.h"
#include "parallel/ddp/step_recorder.h"
#include "parallel/ddp/step_summarizer.h"
#include "parallel/ddp/usage_tracker.h"
#include "shm/sync/fork_generation.h"

namespace paceline::ddp {

// Averages gradients over the ranks during backward: autograd hooks put each gradient into its
// bucket, which is published when it is full; the final callback of the backward handles parameters
// without a gradient, finishes the reduction and leaves the averages in .grad.
//
// The reduction of a step lasts from the first hook of a backward to its final callback. Autograd
// runs both on the thread that called backward, for gradients on the CPU; with a static graph,
// where backwards may be nested, on one thread at a time.
//
// With logical ranks, each of this rank is a leaf of the sum, and has a synchronised backward in
// each step. Its gradients are added up on this rank; the reduction begins with the backward of the
// last leaf.
class Reducer {
 public:
  // `frozen`: all other parameters. They must stay frozen, on all ranks alike. `model`: its number
  // in timelines.
  Reducer(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& frozen,
          const DdpOptions& options, std::uint64_t model);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  // Decides whether the next backwards are synchronised, and clears an aborted step: all gradients
  // become zero then, since only some have been averaged. `requires_backward`: whether a backward
  // must follow this forward if the step is synchronised. After the very first step it rebuilds the
  // buckets, and is then collective. `later`: synchronise_backward follows in this step.
  void before_forward(bool synchronise, bool requires_backward, bool later = false);
  // Call after collective calls between before_forward and the forward itself.
  void end_pre_forward_sync() { recorder_.end_pre_forward_sync(); }
  // Call instead of before_forward when grad mode is off.
  void note_evaluation() {
    called_ = true;
    records_ = false;
  }
  // Whether a forward that requires a synchronised backward has ended, and no gradient has come
  // since.
  bool awaits_backward() const { return awaits_backward_; }
  // The same for forwards that require none, or have not ended.
  bool may_get_gradients() const { return may_get_gradients_; }
  // Whether this thread runs a backward that has begun to reduce gradients.
  bool runs_backward() const;
  // Synchronises the next backward although before_forward said otherwise.
  void synchronise_backward();
  void after_forward() {
    awaits_backward_ = records_ && synchronise_;
    if (records_) recorder_.end_forward();
  }
  const shm::LeafPlan& leaves() const { return buckets_.leaves(); }
  // Sets the leaves of each rank, between steps, after prepare_leaves. Collective.
  void set_leaves(std::vector<shm::LeafRange> ranges);
  // Call before begin_leaves, and before other collective calls: ranks may leave a step anywhere.
  // Aborts a step that leave_leaves left. Also rebuilds the buckets as before_forward does.
  void prepare_leaves();
  // Call at the begin of a step with logical ranks, before begin_leaf.
  void begin_leaves();
  // Call instead of end_leaves if the leaves do not come to their end; does nothing outside of
  // leaves.
  void leave_leaves();
  // Whether all leaves have had their synchronised backward.
  bool is_step_complete() const { return leaves_ended_ == static_cast<int>(graphs_.size()); }
  // Runs when a leaf has its gradients, still in its backward. For the last leaf the step is
  // finished then, and collective calls are allowed.
  void on_leaf_complete(std::function<void(int leaf)> call) { on_leaf_complete_ = std::move(call); }
  // Runs while an exception that leaves a backward is handled; it may throw another in its place.
  void on_backward_error(std::function<void()> call) { on_backward_error_ = std::move(call); }
  // `leaf`: of this rank, from 0. Fails the step if the leaf before ran no synchronised backward,
  // and an earlier one did.
  void begin_leaf(int leaf);
  // Call after the last leaf; checks it as begin_leaf does the others.
  void end_leaves();

  // With a static graph, call for each output of a forward. The backward that begins there is the
  // outermost, and the step ends with it.
  void watch_output(const at::Tensor& output);

  const DdpStats& stats() const { return recorder_.stats(); }

  // This rank's weight in the average of the next step, or that of the current leaf; without
  // weights, all count the same.
  void set_weight(std::optional<double> weight) { weight_ = weight; }
  // Replaces the reduction. Collective; before the first backward.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  // Measures what a bucket's reduction costs, for the timeline. Collective; outside a step.
  void measure_reductions();
  // Notes that the parameters are now the same on all ranks, but that ranks may have accumulated
  // different gradients under no_sync.
  void end_join();
  // Does the communication of a backward with gradients of zero, for Join. Existing gradients keep
  // their values and leave the buckets.
  void main_hook();

 private:
  distributed::BucketReducer& bucket_reducer() { return buckets_.reducer(); }
  void on_gradient(std::size_t index, const at::Tensor& incoming);
  void count_local_backward();
  void reduce_gradient(std::size_t index);
  void check_backward() const;
  void check_process() const;
  StaticGraph& graph() { return graphs_[static_cast<std::size_t>(leaf_)]; }
  void reorder_if_due();
  void count_leaves();
  std::string name_of_leaf(int leaf) const;
  void check_leaf();
  void check_leaf_is_new();
  [[noreturn]] void fail_leaf(int leaf, const std::string& text);
  void abort_step();
  void begin_backward();
  void begin_step();
  void end_leaf(const Indices& missing);
  void end_backward();
  void take_sparse();
  void settle_never_used();
  void mark_ready(std::size_t index);
  void fail_surplus(std::size_t index);

  void finish_at_end_of(int backward);
  void finish_backward();
  Indices missing() const;
  void fail_missing(const Indices& missing);
  void reduce_rest(const Indices& missing);
  void finish_buckets(const std::vector<bool>& own, const std::vector<bool>& fallback);
  void end_step();
  void warn_never_called() noexcept;

  DdpOptions options_;
  shm::OwningProcess process_;
  ParameterClaim claim_;
  std::vector<NamedTensor> parameters_;
  EarlierSums earlier_sums_;
  DelayedParameters delayed_;
  StepRecorder recorder_;
  StepSummarizer summarizer_;
  UsageTracker usage_;
  std::vector<StaticGraph> graphs_;  // by leaf
  GradientBuckets buckets_;
  std::vector<bool> ready_;  // by parameter, in this step
  bool is_first_ = true;     // the first step has yet to be finished
  bool reorder_due_ = false;
  bool synchronise_ = false;
  bool awaits_backward_ = false;
  bool may_get_gradients_ = false;
  bool records_ = false;  // whether the current or last forward belongs to a step
  bool called_ = false;   // whether before_forward or note_evaluation was called
  bool warned_ = false;   // that they were not
  int exceptions_ = std::uncaught_exceptions();  // when this was made
  std::optional<double> weight_;
  std::vector<double> weights_;  // of the leaves that have begun; empty without weights
  SparseLeaves sparse_leaves_;   // with logical ranks: of the leaves that have ended
  int leaf_ = 0;
  int leaves_ended_ = 0;      // in this step, each with a synchronised backward
  bool in_backward_ = false;  // a synchronised one has begun, and not ended
  bool in_leaves_ = false;    // between begin_leaves and end_leaves
  bool left_ = false;         // a step that is not complete
  std::function<void(int)> on_leaf_complete_ = [](int) {};
  std::function<void()> on_backward_error_ = [] {};
  at::Tensor incoming_;           // what autograd gave for the gradient that has just come
  int backward_ = -1;             // autograd's number of the backward with which the step ends
  int last_local_backward_ = -1;  // the last one counted that was not synchronised
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  // Declared last: its destructor must run first, since the hooks call this.
  GradientHooks hooks_;
};

}  // namespace paceline::ddp
