#include "parallel/ddp/reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <paceline/error.h>

#include "base/log.h"
#include "parallel/ddp/sparse_gradients.h"
#include "parallel/with_error_context.h"

namespace paceline::ddp {

Reducer::Reducer(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& frozen,
                 const DdpOptions& options)
    : options_(options),
      claim_(parameters),
      parameters_(parameters),
      delayed_(parameters_, options),
      summarizer_(parameters_, frozen, options),
      usage_(parameters_.size(), options),
      graph_(parameters_.size(), options.static_graph),
      buckets_(parameters_, options, delayed_.flags(), usage_.needs_exchange(), recorder_),
      ready_(parameters_.size()),
      hooks_(parameters_, delayed_.flags(), [this](std::size_t index, const at::Tensor& incoming) {
        on_gradient(index, incoming);
      }) {}

Reducer::~Reducer() {
  warn_if_never_called();
}

void Reducer::before_forward(bool synchronise, bool requires_backward) {
  called_ = true;
  if (bucket_reducer().abort_step()) {
    buckets_.forget_gradients();
    usage_.forget();
    summarizer_.forget_local_backwards();
    recorder_.abort_step();
  }
  buckets_.reset_in_place();
  backward_ = -1;
  synchronise_ = synchronise;
  if (requires_backward) {
    summarizer_.check_frozen();
    if (synchronise) summarizer_.count_forward();
    if (synchronise && std::exchange(reorder_due_, false)) {
      parallel::with_error_context(
          "putting its buckets in order, once, before the second step's forward",
          [&] { buckets_.reorder(usage_.needs_exchange()); });
    }
  }
  hooks_.renew();
  buckets_.prepare_thread();
  records_ = requires_backward;
  if (requires_backward) recorder_.begin_forward(bucket_reducer().steps() + 1);
}

void Reducer::watch_output(const at::Tensor& output) {
  // A leaf would keep the hook beyond this forward.
  if (!synchronise_ || !output.requires_grad() || output.is_leaf()) return;
  output.register_hook([this, alive = std::weak_ptr(alive_)](const at::Tensor&) {
    const int backward = torch::autograd::get_current_graph_task_id();
    if (alive.expired() || !synchronise_ || backward_ == backward) return;
    backward_ = backward;
    torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
  });
}

void Reducer::on_gradient(std::size_t index, const at::Tensor& incoming) {
  usage_.note(index);
  for (const std::size_t i : delayed_.triggered_by(index))
    usage_.note(i);  // nothing else marks them
  if (!synchronise_) return count_local_backward();
  incoming_ = incoming;
  try {
    reduce_gradient(index);
  } catch (const PeerError&) {
    buckets_.detach_from_failed();
    throw;
  }
  incoming_.reset();
}

// If backwards are nested, an outer backward has a smaller number than its inner backwards.
void Reducer::count_local_backward() {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward <= last_local_backward_) return;
  last_local_backward_ = backward;
  summarizer_.count_local_backward();
}

void Reducer::reduce_gradient(std::size_t index) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(
        fmt::format("the backward that reached parameter {} has create_graph = true, and "
                    "DistributedDataParallel cannot average gradients of a backward's graph: "
                    "compute such a term on module()",
                    parameters_[index].name));
  }
  if (bucket_reducer().in_step()) {
    check_backward();
  } else {
    begin_step();
  }
  const auto gradient = graph_.add(index);
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

void Reducer::begin_step() {
  if (options_.average == Average::samples && !weight_) {
    throw UsageError(
        "with average = Average::samples, call set_samples before every synchronised backward: "
        "this one has no count");
  }
  buckets_.begin_step(summarizer_.summarize(false), weight_, summarizer_.frozen_flags());
  recorder_.begin_step(bucket_reducer().steps(), buckets_.plan().buckets.size() + 1);
  graph_.begin_step();
  ready_.assign(ready_.size(), false);
  // Unless watch_output has found where the outermost backward begins.
  if (!options_.static_graph || backward_ < 0) {
    backward_ = torch::autograd::get_current_graph_task_id();
    torch::autograd::Engine::get_default_engine().queue_callback([this, own = backward_] {
      if (backward_ == own) finish_backward();
    });
  }
  if (options_.static_graph && !graph_.counting()) settle_never_used();
}

// The first step of a static graph shows that these never get a gradient.
void Reducer::settle_never_used() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (graph_.expected(i) > 0 || ready_[i]) continue;
    // These follow the trigger, if it gets a gradient.
    if (delayed_.contains(i) && graph_.expected(*delayed_.trigger()) > 0) continue;
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
  if (!parameters_[index].sparse) buckets_.add(index, graph_.arrived(index) > 0, incoming_);
  for (const std::size_t i : delayed_.triggered_by(index)) {
    if (!ready_[i]) mark_ready(i);
  }
}

void Reducer::fail_surplus(std::size_t index) {
  bucket_reducer().fail(fmt::format(
      "parameter {} got gradient number {} in one backward, {}", parameters_[index].name,
      graph_.arrived(index),
      options_.static_graph
          ? fmt::format("and {} in the first: its graph is not static", graph_.expected(index))
          : "as it is part of several graphs (activation checkpointing, a backward inside a "
            "backward): set static_graph if that is the same in every step"));
}

// The final callback of a backward that began a step; with a static graph, of the outermost.
void Reducer::finish_backward() {
  try {
    if (!bucket_reducer().in_step()) begin_step();  // no parameter got a gradient
    recorder_.end_backward();
    if (graph_.counting()) {
      for (const std::size_t i : graph_.record_counts()) mark_ready(i);
    }
    const Indices left = missing();
    if (!usage_.may_miss()) {
      Indices wanted = left;
      std::erase_if(wanted, [&](std::size_t i) { return !parameters_[i].tensor.requires_grad(); });
      if (!wanted.empty()) fail_missing(wanted);
    }
    reduce_rest(left);
  } catch (...) {
    backward_ = -1;
    buckets_.detach_from_failed();
    throw;
  }
  recorder_.end_step(bucket_reducer());
  end_step();
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
      "{} of {} parameters got no gradient in this backward: {}. {}", missing.size(),
      parameters_.size(), names_of(parameters_, missing),
      options_.static_graph
          ? "In the first step they did, so the graph is not static as static_graph says."
          : "If that is intended, set find_unused_parameters; otherwise include every output of "
            "these parameters in the loss."));
}

// A missing gradient counts as zero; if a parameter got none on any rank, its .grad stays.
void Reducer::reduce_rest(const Indices& missing) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (const std::size_t i : missing) before.push_back(buckets_.kept_gradient(i));
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
  reduce_sparse(parameters_, usage_.used(), bucket_reducer().share(), options_.process_group);
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
  graph_.end_step();
  usage_.end_step();
  summarizer_.forget_local_backwards();
  backward_ = -1;
  weight_.reset();
  if (!std::exchange(is_first_, false)) return;
  // If steps may differ, the first one does not predict the next.
  reorder_due_ = options_.static_graph || !options_.find_unused_parameters;
}

void Reducer::main_hook() {
  const at::NoGradGuard no_grad;
  buckets_.detach();
  buckets_.begin_step(summarizer_.summarize(true), weight_, summarizer_.frozen_flags());
  buckets_.add_zeros();
  const std::size_t count = parameters_.size();
  finish_buckets(std::vector<bool>(count, false), std::vector<bool>(count, true));
  reduce_sparse_zeros(parameters_, usage_.used(), options_.process_group);
  if (graph_.counting()) graph_.record_used(usage_.used());
  end_step();
}

void Reducer::end_join() {
  summarizer_.note_same_parameters();
  summarizer_.forget_local_backwards();
}

// Warns if gradients arrived although no forward of the wrapper was ever called.
void Reducer::warn_if_never_called() const noexcept {
  if (called_ || std::uncaught_exceptions() > exceptions_) return;
  Indices arrived;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (usage_.used_locally()[i]) arrived.push_back(i);
  }
  if (arrived.empty()) return;
  base::log(LogLevel::warning,
            "DistributedDataParallel averaged nothing: gradients arrived in {}, but no forward ran "
            "through the wrapper: call the wrapper instead of its module",
            names_of(parameters_, arrived));
}

}  // namespace paceline::ddp
