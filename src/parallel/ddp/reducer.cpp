#include "parallel/ddp/reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/log.h"
#include "parallel/with_error_context.h"

namespace paceline::ddp {
namespace {

// A sparse gradient of zero, like an embedding's.
at::Tensor nothing_for(const at::Tensor& parameter) {
  return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(),
                                          parameter.options().layout(at::kSparse));
}

}  // namespace

Reducer::Reducer(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& frozen,
                 const DdpOptions& options)
    : options_(options),
      ranks_(get_world_size(options.process_group)),
      claim_(parameters),
      frozen_(frozen),
      frozen_flags_(parameters.size()) {
  const auto& delayed = options.delay_all_reduce_named_params;
  Indices order;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor, sparse] = parameters[i];
    const bool is_delayed = std::ranges::count(delayed, name) > 0;
    parameters_.push_back({name, tensor, sparse, is_delayed, {}, {}, nullptr});
    if (name == options.param_to_hook_all_reduce) trigger_ = i;
    if (!sparse) (is_delayed ? delayed_ : order).push_back(i);
  }
  // Gradients become ready in roughly the reverse of the order in which layers were registered.
  std::ranges::reverse(order);
  make_plan(order);
  make_bucket_reducer();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].delayed) attach_hook(i);
  }
  for (const auto* const list : {&parameters, &frozen}) {
    for (const NamedTensor& one : *list) {
      const auto& data = one.tensor.unsafeGetTensorImpl()->unsafe_storage();
      watched_.push_back({one.tensor, data.getWeakStorageImpl()});
    }
  }
  note_same_parameters();
}

Reducer::~Reducer() {
  warn_if_never_called();
  for (auto& parameter : parameters_) {
    if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
  }
}

void Reducer::attach_hook(std::size_t index) {
  Parameter& parameter = parameters_[index];
  parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
  parameter.hook =
      parameter.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, index](const torch::autograd::variable_list& outputs,
                        const torch::autograd::variable_list& inputs) {
            incoming_ = inputs[0];
            on_gradient(index);
            incoming_.reset();
            return outputs;
          }));
}

// A parameter whose data was exchanged, as torch::load does, has a new accumulator.
void Reducer::renew_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (!parameter.accumulator) continue;
    if (torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) ==
        parameter.accumulator) {
      continue;
    }
    const at::Tensor& bucket_view = parameter.bucket_view;
    if (bucket_view.defined() && (bucket_view.scalar_type() != parameter.tensor.scalar_type() ||
                                  bucket_view.device() != parameter.tensor.device() ||
                                  bucket_view.sizes() != parameter.tensor.sizes())) {
      throw UsageError(fmt::format(
          "parameter {} has changed its type, device or shape since it was wrapped: change the "
          "module first, then wrap it",
          parameter.name));
    }
    parameter.accumulator->del_post_hook(parameter.hook);
    attach_hook(i);
  }
}

void Reducer::before_forward(bool synchronise, bool counts) {
  called_ = true;
  if (bucket_reducer_->abandon_step()) {
    forget_gradients();
    recorder_.abandon_step();
  }
  return_in_place();
  backward_ = -1;
  synchronise_ = synchronise;
  if (counts) {
    check_frozen();
    ++(synchronise ? forwards_ : local_forwards_);
    if (synchronise && rebuild_due_) {
      parallel::with_error_context(
          "putting its buckets in order, once, before the second step's forward",
          [&] { rebuild(); });
    }
  }
  renew_hooks();
  bucket_reducer_->prepare_thread();
  records_ = counts;
  if (counts) recorder_.begin_forward(bucket_reducer_->steps() + 1);
}

// What was frozen when the model was wrapped has no hook.
void Reducer::check_frozen() const {
  for (const NamedTensor& one : frozen_) {
    if (!one.tensor.requires_grad()) continue;
    throw UsageError(
        fmt::format("parameter {} takes a gradient, and took none when it was wrapped, so that it "
                    "would not be averaged: wrap the module again, or wrap it first and freeze "
                    "parameters then",
                    one.name));
  }
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

void Reducer::on_gradient(std::size_t index) {
  parameters_[index].used = true;
  if (trigger_ == index) {
    for (const std::size_t i : delayed_) parameters_[i].used = true;  // nobody else says so
  }
  if (!synchronise_) return;
  try {
    reduce_gradient(index);
  } catch (const PeerError&) {
    detach_from_failed();
    throw;
  }
}

void Reducer::reduce_gradient(std::size_t index) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(fmt::format(
        "the backward that reached parameter {} creates a graph of itself (create_graph), whose "
        "gradients DistributedDataParallel cannot average: compute such a term on module()",
        parameters_[index].name));
  }
  if (bucket_reducer_->in_step()) {
    check_backward();
  } else {
    begin_step();
  }
  Parameter& parameter = parameters_[index];
  ++parameter.arrived;
  if (options_.static_graph && learning_) {
    arrivals_.push_back(index);
    return;
  }
  if (parameter.arrived > parameter.expected) {
    bucket_reducer_->fail(fmt::format(
        "parameter {} got gradient number {} in one backward, {}", parameter.name,
        parameter.arrived,
        options_.static_graph
            ? fmt::format("and {} in the first: its graph is not static", parameter.expected)
            : "as it is part of several graphs (activation checkpointing, a backward inside a "
              "backward): set static_graph if that is the same in every step"));
  }
  if (parameter.arrived == parameter.expected) mark_ready(index);
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
        "with average = Average::samples, call set_samples before every backward that is "
        "synchronised: this one has no count");
  }
  bucket_reducer_->begin_step(summarise(false), weight_, frozen_flags_);
  recorder_.begin_step(bucket_reducer_->steps(), plan_.buckets.size() + 1);
  outstanding_.clear();
  for (const auto& bucket : plan_.buckets) outstanding_.push_back(bucket.parameters.size());
  arrivals_.clear();
  for (auto& parameter : parameters_) {
    parameter.ready = false;
    parameter.arrived = 0;
  }
  // Unless watch_output has seen where the outermost begins.
  if (!options_.static_graph || backward_ < 0) {
    backward_ = torch::autograd::get_current_graph_task_id();
    torch::autograd::Engine::get_default_engine().queue_callback([this, own = backward_] {
      if (backward_ == own) finish_backward();
    });
  }
  if (options_.static_graph && !learning_) settle_never_used();
}

shm::StepSummary Reducer::summarise(bool joined) {
  bool any_frozen = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    frozen_flags_[i] = parameters_[i].tensor.requires_grad() ? 0 : 1;
    any_frozen = any_frozen || frozen_flags_[i] != 0;
  }
  modifications_ = count_modifications();
  return {.forwards = forwards_,
          .local_forwards = options_.average == Average::samples ? 0 : local_forwards_,
          .frozen = any_frozen ? shm::fingerprint(frozen_flags_) : 0,
          .modifications = modifications_ - same_parameters_,
          .joined = joined ? 1U : 0U};
}

// Writes in place, and exchanges of data, of all parameters.
std::uint32_t Reducer::count_modifications() {
  std::uint32_t writes = 0;
  for (Watched& one : watched_) {
    const auto& data = one.tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (data.unsafeGetStorageImpl() != one.storage._unsafe_get_target()) {
      one.storage = data.getWeakStorageImpl();
      ++exchanges_;
    }
    if (!one.tensor.is_inference()) writes += static_cast<std::uint32_t>(one.tensor._version());
  }
  return writes + exchanges_;
}

void Reducer::note_same_parameters() {
  same_parameters_ = count_modifications();
}

// Ranks that have changed theirs a different number of times may have the same all the same: one
// may have exchanged them for an evaluation.
void Reducer::compare_parameters() {
  std::vector<NamedTensor> all = frozen_;
  for (const auto& parameter : parameters_) all.push_back({parameter.name, parameter.tensor});
  parallel::with_error_context(
      "comparing parameters, which the ranks have changed a different number of times: load a "
      "model on every rank, or before it is wrapped; let a closure return the loss averaged over "
      "the ranks",
      [&] { check_same_values(all, options_.process_group, bucket_reducer_->steps()); });
  same_parameters_ = modifications_;
}

void Reducer::warn_if_never_called() const noexcept {
  Indices arrived;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].used) arrived.push_back(i);
  }
  if (called_ || arrived.empty()) return;
  base::log(LogLevel::warning,
            "DistributedDataParallel averaged nothing: gradients arrived in {}, but no forward was "
            "its own; call the wrapper in place of the module that it wraps",
            names_of(arrived));
}

// What the first step of a static graph taught: these get no gradient in any.
void Reducer::settle_never_used() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.expected > 0 || parameter.ready) continue;
    // These come with the trigger, if that does.
    if (parameter.delayed && parameters_[*trigger_].expected > 0) continue;
    if (used_anywhere_[i]) {
      mark_ready(i);
    } else {
      parameter.ready = true;
      if (!parameter.sparse) count_down(plan_.places[i].bucket);
    }
  }
}

void Reducer::mark_ready(std::size_t index) {
  Parameter& parameter = parameters_[index];
  parameter.ready = true;
  if (!parameter.sparse) {
    if (learning_ && !parameter.delayed) arrivals_.push_back(index);
    take_gradient(index);
    count_down(plan_.places[index].bucket);
  }
  if (trigger_ == index) {
    for (const std::size_t i : delayed_) {
      if (!parameters_[i].ready) mark_ready(i);
    }
  }
}

void Reducer::count_down(std::size_t bucket) {
  if (--outstanding_[bucket] == 0) publish(bucket);
  bucket_reducer_->try_progress();
  recorder_.look_at(*bucket_reducer_);
}

void Reducer::publish(std::size_t bucket) {
  recorder_.add_bucket(bucket, bucket_reducer_->tensor(bucket).nbytes());
  bucket_reducer_->publish(bucket);
}

// The final callback of a backward that began a step; with a static graph, of the outermost.
void Reducer::finish_backward() {
  try {
    if (!bucket_reducer_->in_step()) begin_step();  // no parameter got a gradient
    recorder_.end_backward();
    if (options_.static_graph && learning_) learn_graph();
    Indices left = missing();
    if (!may_miss()) {
      Indices wanted = left;
      std::erase_if(wanted, [&](std::size_t i) { return !parameters_[i].tensor.requires_grad(); });
      if (!wanted.empty()) fail_missing(wanted);
    }
    reduce_rest(left);
  } catch (...) {
    backward_ = -1;
    detach_from_failed();
    throw;
  }
  recorder_.end_step(*bucket_reducer_);
  end_step();
}

// How often each parameter gets a gradient is now known, of this rank's graph; it is ready with the
// last.
void Reducer::learn_graph() {
  for (auto& parameter : parameters_) parameter.expected = parameter.arrived;
  const Indices all = std::exchange(arrivals_, {});
  std::vector<int> seen(parameters_.size());
  for (const std::size_t i : all) {
    if (++seen[i] == parameters_[i].expected) mark_ready(i);
  }
}

bool Reducer::may_miss() const {
  return options_.static_graph ? learning_ : options_.find_unused_parameters;
}

Reducer::Indices Reducer::missing() const {
  Indices indices;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].ready) indices.push_back(i);
  }
  return indices;
}

// Those that got no gradient count as zero, and .grad of one that got none anywhere stays.
void Reducer::reduce_rest(const Indices& missing) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (const std::size_t i : missing) {
    const at::Tensor& grad = parameters_[i].tensor.grad();
    before.push_back(is_view(parameters_[i]) ? grad.clone() : grad);
  }
  const std::vector<bool> skipped = skip_unused();
  for (const std::size_t i : missing) {
    const bool is_skipped =
        !skipped.empty() && !parameters_[i].sparse && skipped[plan_.places[i].bucket];
    if (!parameters_[i].ready && !is_skipped) mark_ready(i);
  }
  used_.assign(parameters_.size(), false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) used_[i] = parameters_[i].used;
  finish_buckets();
  for (std::size_t k = 0; k < missing.size(); ++k) {
    if (!used_[missing[k]]) parameters_[missing[k]].tensor.mutable_grad() = before[k];
  }
  if (is_alone()) return;
  reduce_sparse();
  if (!options_.gradient_as_bucket_view) put_back();
}

// With skip_all_reduce_unused_params, buckets of which no parameter was used since the last
// synchronised step: all but the last one of the bucket reducer, which carries more than gradients.
std::vector<bool> Reducer::skip_unused() {
  if (!options_.skip_all_reduce_unused_params) return {};
  std::vector<bool> skipped(plan_.buckets.size());
  const std::size_t last = bitmap_ ? plan_.buckets.size() : plan_.buckets.size() - 1;
  for (std::size_t b = 0; b < last; ++b) {
    skipped[b] = std::ranges::none_of(plan_.buckets[b].parameters,
                                      [&](std::size_t i) { return parameters_[i].used; });
    if (skipped[b]) bucket_reducer_->skip(b);
  }
  return skipped;
}

// Tells and asks which parameters were used, where the bucket reducer has a place for it.
void Reducer::finish_buckets() {
  if (!bitmap_) {
    bucket_reducer_->finish();
    if (options_.static_graph) used_ = used_anywhere_;
    if (bucket_reducer_->modified_apart()) compare_parameters();
    return;
  }
  const std::size_t bitmap = plan_.buckets.size();
  auto* const used = bucket_reducer_->tensor(bitmap).data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < used_.size(); ++i) used[i] = used_[i] ? 1 : 0;
  publish(bitmap);
  bucket_reducer_->finish();
  for (std::size_t i = 0; i < used_.size(); ++i) used_[i] = used[i] != 0;
  if (bucket_reducer_->modified_apart()) compare_parameters();
}

// One call for each, in the order of the parameters.
void Reducer::reduce_sparse() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].sparse || !used_[i]) continue;
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    at::Tensor part = !grad.defined()    ? nothing_for(parameters_[i].tensor)
                      : grad.is_sparse() ? grad
                                         : grad.to_sparse(1);
    const double share = bucket_reducer_->share();
    // What a rank without samples has may not even be finite.
    part = share == 0 ? nothing_for(parameters_[i].tensor) : part.coalesce().mul(share);
    all_reduce(part, {.group = options_.process_group});
    grad = part;
  }
}

void Reducer::end_step() {
  return_in_place();
  backward_ = -1;
  for (auto& parameter : parameters_) parameter.used = false;
  weight_.reset();
  if (!learning_) return;
  learning_ = false;
  if (options_.static_graph) used_anywhere_ = used_;
  // Where steps may differ, the first says nothing of the next.
  rebuild_due_ = options_.static_graph || !options_.find_unused_parameters;
}

void Reducer::main_hook() {
  const at::NoGradGuard no_grad;
  detach_gradients();
  bucket_reducer_->begin_step(summarise(true), weight_, frozen_flags_);
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    bucket_reducer_->tensor(b).zero_();
    bucket_reducer_->publish(b);
    bucket_reducer_->try_progress();
  }
  used_.assign(parameters_.size(), false);
  finish_buckets();
  if (!bitmap_ && !options_.static_graph) used_.assign(parameters_.size(), true);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.sparse && used_[i]) {
      all_reduce(nothing_for(parameter.tensor), {.group = options_.process_group});
    }
    if (learning_ && options_.static_graph) parameter.expected = used_[i] ? 1 : 0;
  }
  if (learning_) arrivals_ = order_;
  end_step();
}

void Reducer::fail_missing(const Indices& missing) {
  bucket_reducer_->fail(fmt::format(
      "{} of {} parameters got no gradient in this backward: {}. {}", missing.size(),
      parameters_.size(), names_of(missing),
      options_.static_graph
          ? "In the first step they did, so the graph is not static as static_graph says."
          : "If that is meant, set find_unused_parameters; else make every output that these "
            "parameters feed part of the loss."));
}

}  // namespace paceline::ddp
