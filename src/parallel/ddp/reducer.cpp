#include "parallel/ddp/reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include <paceline/error.h>

#include "base/log.h"
#include "distributed/process_state.h"
#include "parallel/ddp/reduction_cost.h"
#include "parallel/with_error_context.h"

namespace paceline::ddp {

Reducer::Reducer(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& frozen,
                 const DdpOptions& options, std::uint64_t model)
    : options_(options),
      claim_(parameters),
      parameters_(parameters),
      earlier_sums_(parameters_,
                    options.average == Average::sum && get_rank(options.process_group) > 0),
      delayed_(parameters_, options),
      recorder_(parameters_.front().tensor.device(), model),
      summarizer_(parameters_, frozen, options),
      usage_(parameters_.size(), options),
      graphs_(1, StaticGraph(parameters_.size(), options.static_graph)),
      buckets_(parameters_, options, delayed_.flags(), usage_.needs_exchange(), recorder_),
      ready_(parameters_.size()),
      hooks_(parameters_, delayed_.flags(), [this](std::size_t index, const at::Tensor& incoming) {
        on_gradient(index, incoming);
      }) {
  count_leaves();
}

Reducer::~Reducer() {
  if (std::uncaught_exceptions() <= exceptions_ && !called_) warn_never_called();
}

void Reducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  buckets_.set_hook(std::move(hook));
  recorder_.describe_reductions({});  // the hook's cost is not known
}

void Reducer::measure_reductions() {
  std::size_t bytes = 0;
  for (const NamedTensor& one : parameters_) bytes += one.tensor.nbytes();
  recorder_.describe_reductions(reduction_cost(options_.process_group, bytes));
}

void Reducer::before_forward(bool synchronise, bool requires_backward, bool later) {
  called_ = true;
  if (requires_backward && (synchronise || later)) check_process();
  if (in_backward_ || bucket_reducer().in_step()) {
    if (in_leaves_) {
      throw UsageError(
          "an exception ended a backward in this loop over logical ranks, and no forward can "
          "follow there: let the exception leave the loop, and repeat the step with a new loop");
    }
    abort_step();
  }
  buckets_.reset_in_place();
  backward_ = -1;
  synchronise_ = synchronise;
  awaits_backward_ = false;
  may_get_gradients_ = synchronise;
  if (requires_backward) {
    summarizer_.check_frozen();
    if (synchronise) summarizer_.count_forward(leaf_);
    if ((synchronise || later) && options_.logical_ranks == 0) reorder_if_due();
  }
  hooks_.renew();
  bucket_reducer().prepare_thread();
  records_ = requires_backward;
  if (requires_backward) recorder_.begin_forward(bucket_reducer().steps() + 1);
}

bool Reducer::runs_backward() const {
  return in_backward_ && torch::autograd::get_current_graph_task_id() >= 0;
}

void Reducer::synchronise_backward() {
  if (!std::exchange(synchronise_, true)) summarizer_.count_forward(leaf_);
}

void Reducer::abort_step() {
  // Other ranks may be in the step that this one did not come to.
  if (!bucket_reducer().in_step()) {
    buckets_.begin_step(summarizer_.summarize(false), {}, summarizer_.frozen_flags());
  }
  bucket_reducer().abort_step();
  buckets_.forget_gradients();
  usage_.forget();
  summarizer_.forget_local_backwards();
  if (options_.logical_ranks > 0) summarizer_.abort_leaves(bucket_reducer().steps());
  recorder_.abort_step();
  weights_.clear();
  sparse_leaves_.clear();
  in_backward_ = left_ = false;
  leaves_ended_ = 0;
}

void Reducer::reorder_if_due() {
  if (!std::exchange(reorder_due_, false)) return;
  parallel::with_error_context("putting its buckets in order, once, before the second step", [&] {
    earlier_sums_.keep([&] { buckets_.reorder(usage_.needs_exchange()); });
  });
}

void Reducer::watch_output(const at::Tensor& output) {
  // A leaf would keep the hook beyond this forward.
  if (!synchronise_ || !output.requires_grad() || output.is_leaf()) return;
  output.register_hook([this, alive = std::weak_ptr(alive_)](const at::Tensor&) {
    const int backward = torch::autograd::get_current_graph_task_id();
    if (alive.expired() || !synchronise_ || backward_ == backward) return;
    if (!hooks_.are_in_this_backward()) return;
    finish_at_end_of(backward);
  });
}

// A backward may outlive its reducer.
void Reducer::finish_at_end_of(int backward) {
  backward_ = backward;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, backward, alive = std::weak_ptr(alive_)] {
        if (!alive.expired() && backward_ == backward) finish_backward();
      });
}

void Reducer::on_gradient(std::size_t index, const at::Tensor& incoming) {
  awaits_backward_ = may_get_gradients_ = false;
  usage_.note(index);
  for (const std::size_t i : delayed_.triggered_by(index))
    usage_.note(i);  // nothing else marks them
  if (earlier_sums_.take(index)) {
    const at::NoGradGuard no_grad;
    parameters_[index].tensor.mutable_grad().copy_(incoming);
  }
  if (!synchronise_) return count_local_backward();
  incoming_ = incoming;
  try {
    reduce_gradient(index);
  } catch (const Error&) {
    buckets_.detach_from_failed();
    on_backward_error_();
    throw;
  }
  incoming_.reset();
}

// If backwards are nested, an outer backward has a smaller number than its inner backwards.
void Reducer::count_local_backward() {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward <= last_local_backward_) return;
  if (last_local_backward_ >= 0 && !called_) warn_never_called();
  last_local_backward_ = backward;
  if (!in_leaves_) return summarizer_.count_local_backward();
  if (leaves_ended_ > leaf_) {
    fail_leaf(leaf_,
              "ran a backward under no_sync after its synchronised one in this step: run the "
              "synchronised one last");
  }
  summarizer_.count_local_backward(leaf_);
}

void Reducer::reduce_gradient(std::size_t index) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(
        fmt::format("the backward that reached parameter {} has create_graph = true, and "
                    "DistributedDataParallel cannot average gradients of a backward's graph: "
                    "compute such a term on module()",
                    parameters_[index].name));
  }
  if (in_backward_) {
    check_backward();
  } else {
    begin_backward();
  }
  const auto gradient = graph().add(index);
  if (gradient == StaticGraph::Gradient::surplus) fail_surplus(index);
  if (gradient == StaticGraph::Gradient::last) mark_ready(index);
}

// The hooks of a step all belong to one backward.
void Reducer::check_backward() const {
  if (options_.static_graph || torch::autograd::get_current_graph_task_id() == backward_) return;
  throw UsageError(
      "a backward reached the model while its last one has not completed: if that one threw, run a "
      "forward before the next; if it is a backward inside another, as with activation "
      "checkpointing, set static_graph");
}

void Reducer::begin_backward() {
  if (options_.average == Average::samples && !weight_) {
    throw UsageError(
        "with average = Average::samples, call set_samples before every synchronised backward: "
        "this one has no count");
  }
  check_leaf_is_new();
  summarizer_.note_backward(leaf_);
  weights_.resize(weight_ ? static_cast<std::size_t>(leaf_) : 0);
  if (weight_) {
    weights_.push_back(*weight_);
    buckets_.set_leaf_weight(*weight_);
  }
  if (buckets_.is_last_leaf()) begin_step();
  in_backward_ = true;
  graph().begin_step();
  ready_.assign(ready_.size(), false);
  // Unless watch_output has found where the outermost backward begins.
  if (!options_.static_graph || backward_ < 0) {
    finish_at_end_of(torch::autograd::get_current_graph_task_id());
  }
  if (options_.static_graph && !graph().counting()) settle_never_used();
}

void Reducer::check_process() const {
  distributed::check_not_forked(process_, "a step of DistributedDataParallel");
}

void Reducer::begin_step() {
  check_process();
  const int differing = summarizer_.differing_leaf();
  if (differing > 0) {
    fail_leaf(differing,
              fmt::format("and {} have run different numbers of training forwards, or of backwards "
                          "under no_sync: each logical rank must run as many",
                          name_of_leaf(0)));
  }
  buckets_.begin_step(summarizer_.summarize(false), weights_, summarizer_.frozen_flags());
  recorder_.begin_step(bucket_reducer().steps(), buckets_.plan().buckets.size() + 1);
  if (options_.average == Average::samples) {
    recorder_.count_samples(std::accumulate(weights_.begin(), weights_.end(), 0.0));
  }
}

// The first step of a static graph shows that these never get a gradient.
void Reducer::settle_never_used() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (graph().expected(i) > 0 || ready_[i]) continue;
    // These follow the trigger, if it gets a gradient.
    if (delayed_.contains(i) && graph().expected(*delayed_.trigger()) > 0) continue;
    if (usage_.is_ever_used(i)) {
      mark_ready(i);
    } else {
      ready_[i] = true;
      if (!parameters_[i].sparse) buckets_.leave_out(i);
    }
  }
}

void Reducer::mark_ready(std::size_t index) {
  ready_[index] = true;
  if (!parameters_[index].sparse) buckets_.add(index, graph().arrived(index) > 0, incoming_);
  for (const std::size_t i : delayed_.triggered_by(index)) {
    if (!ready_[i]) mark_ready(i);
  }
}

void Reducer::fail_surplus(std::size_t index) {
  bucket_reducer().fail(fmt::format(
      "parameter {} got gradient number {} in one backward, {}", parameters_[index].name,
      graph().arrived(index),
      options_.static_graph
          ? fmt::format("and {} in the first: its graph is not static", graph().expected(index))
          : "as it is part of several graphs (activation checkpointing, a backward inside a "
            "backward): set static_graph if that is the same in every step"));
}

// The final callback of a backward that began a step; with a static graph, of the outermost.
void Reducer::finish_backward() {
  try {
    if (!in_backward_) begin_backward();  // no parameter got a gradient
    recorder_.end_backward();
    if (graph().counting()) {
      for (const std::size_t i : graph().record_counts()) mark_ready(i);
    }
    const Indices left = missing();
    if (!usage_.may_miss()) {
      Indices wanted = left;
      std::erase_if(wanted, [&](std::size_t i) { return !parameters_[i].tensor.requires_grad(); });
      if (!wanted.empty()) fail_missing(wanted);
    }
    if (!buckets_.is_last_leaf()) return end_leaf(left);
    reduce_rest(left);
    recorder_.end_step(bucket_reducer());
    end_step();
    earlier_sums_.note();
  } catch (...) {
    backward_ = -1;
    buckets_.detach_from_failed();
    on_backward_error_();
    throw;
  }
}

void Reducer::end_backward() {
  in_backward_ = false;
  ++leaves_ended_;
  backward_ = -1;
  weight_.reset();
}

Indices Reducer::missing() const {
  Indices indices;
  for (std::size_t i = 0; i < ready_.size(); ++i) {
    if (!ready_[i]) indices.push_back(i);
  }
  return indices;
}

void Reducer::fail_missing(const Indices& missing) {
  bucket_reducer().fail(fmt::format(
      "rank {}: {} of {} parameters got no gradient in this backward: {}. {}",
      distributed::global_rank_of(options_.process_group, get_rank(options_.process_group)),
      missing.size(), parameters_.size(), names_of(parameters_, missing),
      options_.static_graph
          ? "In the first step they did, so the graph is not static as static_graph says."
          : "If that is intended, set find_unused_parameters; otherwise include every output of "
            "these parameters in the loss."));
}

// A missing gradient counts as zero; if a parameter got none on any rank, its .grad stays.
void Reducer::reduce_rest(const Indices& missing) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (const std::size_t i : missing) {
    before.push_back(buckets_.kept_gradient(i));
    if (!earlier_sums_.take(i)) continue;
    before.back() = before.back().clone();
    parameters_[i].tensor.mutable_grad().zero_();
  }
  const auto skipped = buckets_.skip(usage_.unused_buckets(buckets_.plan()));
  for (const std::size_t i : missing) {
    const bool is_skipped =
        !skipped.empty() && !parameters_[i].sparse && skipped[buckets_.plan().places[i].bucket];
    if (!ready_[i] && !is_skipped) mark_ready(i);
  }
  finish_buckets(usage_.used_locally(), usage_.used_locally());
  for (std::size_t k = 0; k < missing.size(); ++k) {
    if (!usage_.used(missing[k])) parameters_[missing[k]].tensor.mutable_grad() = before[k];
  }
  if (buckets_.keeps_gradients_in_place()) return;
  if (options_.logical_ranks > 0) {
    take_sparse();
    reduce_sparse_leaves(parameters_, std::exchange(sparse_leaves_, {}), weights_,
                         options_.average == Average::sum, usage_.used(), buckets_.leaves(),
                         options_.process_group);
  } else {
    reduce_sparse(parameters_, usage_.used(), bucket_reducer().share(), options_.process_group);
  }
  if (!options_.gradient_as_bucket_view) buckets_.put_back(usage_.used());
}

// `own`: the parameters that this rank has used. `fallback`: the parameters that any rank has
// used, if the ranks do not exchange that.
void Reducer::finish_buckets(const std::vector<bool>& own, const std::vector<bool>& fallback) {
  usage_.set_used(buckets_.finish(own), fallback);
  if (bucket_reducer().modifications_differ())
    summarizer_.compare_parameters(bucket_reducer().steps());
}

void Reducer::end_step() {
  buckets_.end_step();
  for (StaticGraph& graph : graphs_) graph.end_step();
  usage_.end_step();
  summarizer_.forget_local_backwards();
  end_backward();
  weights_.clear();
  if (options_.logical_ranks == 0) leaves_ended_ = 0;
  // If steps may differ, the first one does not predict the next.
  if (std::exchange(is_first_, false)) {
    reorder_due_ = options_.static_graph || !options_.find_unused_parameters;
  }
  on_leaf_complete_(leaf_);
}

void Reducer::main_hook() {
  const at::NoGradGuard no_grad;
  earlier_sums_.keep([&] { buckets_.detach(); });
  if (weight_) weights_ = {*weight_};
  summarizer_.note_backward(leaf_);
  buckets_.begin_step(summarizer_.summarize(true), weights_, summarizer_.frozen_flags());
  buckets_.add_zeros();
  const std::size_t count = parameters_.size();
  finish_buckets(std::vector<bool>(count, false), std::vector<bool>(count, true));
  reduce_sparse_zeros(parameters_, usage_.used(), options_.process_group);
  if (graph().counting()) graph().record_used(usage_.used());
  end_step();
}

void Reducer::end_join() {
  summarizer_.note_same_parameters();
  summarizer_.forget_local_backwards();
}

// Warns once if gradients arrived, although no forward of the wrapper was called.
void Reducer::warn_never_called() noexcept {
  Indices arrived;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (usage_.used_locally()[i]) arrived.push_back(i);
  }
  if (arrived.empty() || std::exchange(warned_, true)) return;
  base::log(LogLevel::warning,
            "DistributedDataParallel averaged nothing: gradients arrived in {}, but no forward ran "
            "through the wrapper: call the wrapper instead of its module",
            names_of(parameters_, arrived));
}

}  // namespace paceline::ddp
