#include "parallel/ddp/reducer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "parallel/ddp/hook_channel.h"

namespace paceline::ddp {
namespace {

using distributed::BucketChannel;

constexpr double kMiB = 1024 * 1024;
constexpr double kDefaultCap = 25;
// Small, so that communication starts early.
constexpr double kDefaultFirstCap = 1;
// What copying this much takes is no more than a bucket of its own costs.
constexpr std::size_t kAloneBytes = std::size_t{64} << 10;
// How many parameters an error lists before it only counts.
constexpr std::size_t kMaxNames = 10;

std::vector<std::size_t> caps_of(const DdpOptions& options) {
  std::vector<double> mib{kDefaultFirstCap, kDefaultCap};
  if (options.bucket_cap_mb) mib = {*options.bucket_cap_mb};
  if (!options.bucket_cap_mb_list.empty()) mib = options.bucket_cap_mb_list;
  constexpr double kMost = 1ULL << 62;
  std::vector<std::size_t> caps;
  for (const double cap : mib)
    caps.push_back(static_cast<std::size_t>(std::min(cap * kMiB, kMost)));
  return caps;
}

// A tensor over part of `flat` that autograd does not take for a view, since zero_grad refuses to
// detach those.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const bool dense = like.is_non_overlapping_and_dense();
  at::Tensor result = at::empty({0}, flat.options());
  return result.set_(flat.storage(), flat.storage_offset() + offset, like.sizes(),
                     dense ? like.strides() : at::empty_like(like).strides());
}

// Whether the elements of both have the same bytes at the same places.
bool lies_like(const at::Tensor& grad, const at::Tensor& view) {
  return grad.layout() == at::kStrided && grad.scalar_type() == view.scalar_type() &&
         grad.strides() == view.strides() && grad.is_non_overlapping_and_dense();
}

// The parameters that have a reducer: two would reduce the same gradients twice.
class Wrapped {
 public:
  static void add(const std::vector<NamedTensor>& parameters) {
    Wrapped& all = instance();
    const std::lock_guard lock(all.mutex_);
    for (const auto& one : parameters) {
      if (all.tensors_.count(one.tensor.unsafeGetTensorImpl()) == 0) continue;
      throw UsageError(
          fmt::format("parameter {} is wrapped by another DistributedDataParallel, which would "
                      "average its gradient once more: let that one go first",
                      one.name));
    }
    for (const auto& one : parameters) all.tensors_.insert(one.tensor.unsafeGetTensorImpl());
  }
  static void remove(const at::Tensor& tensor) {
    Wrapped& all = instance();
    const std::lock_guard lock(all.mutex_);
    all.tensors_.erase(tensor.unsafeGetTensorImpl());
  }

 private:
  static Wrapped& instance() {
    static auto* const all = new Wrapped;
    return *all;
  }
  std::mutex mutex_;
  std::set<const void*> tensors_;
};

}  // namespace

Reducer::Reducer(const std::vector<NamedTensor>& parameters, const DdpOptions& options)
    : options_(options) {
  const auto& delayed = options.delay_all_reduce_named_params;
  Indices order;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor, sparse] = parameters[i];
    parameters_.push_back({name, tensor, sparse, {}, {}, nullptr});
    if (name == options.param_to_hook_all_reduce) trigger_ = i;
    if (sparse) continue;
    (std::ranges::count(delayed, name) > 0 ? delayed_ : order).push_back(i);
  }
  // Gradients become ready in roughly the reverse of the order in which layers were registered.
  std::ranges::reverse(order);
  make_plan(order);
  make_channel();
  Wrapped::add(parameters);
  attach_hooks();
}

Reducer::~Reducer() {
  for (auto& parameter : parameters_) {
    if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
    Wrapped::remove(parameter.tensor);
  }
}

// `order` has all that are neither sparse nor delayed.
void Reducer::make_plan(const Indices& order) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters_) tensors.push_back(parameter.tensor);
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  BucketLimits limits{caps_of(options_), adopts_gradients() ? kAloneBytes : kNever};
  order_ = order;
  plan_ = {};
  add_buckets(plan_, tensors, order_, limits);
  limits.alone = kNever;
  add_buckets(plan_, tensors, delayed_, limits);
}

// The same on every rank, as the plan depends on it.
bool Reducer::adopts_gradients() const {
  const auto device = parameters_.front().tensor.device().type();
  return options_.zero_copy && !hook_ &&
         distributed::supports_adoption(options_.process_group.c10d(), device);
}

// Whether the channel has one more bucket that tells which parameters were used on any rank.
bool Reducer::needs_bitmap() const {
  if (hook_ || plan_.buckets.empty()) return true;  // or there would be nothing for the channel
  if (options_.static_graph) return learning_;
  return options_.find_unused_parameters && !options_.skip_all_reduce_unused_params;
}

void Reducer::make_channel() {
  std::vector<BucketChannel::Bucket> buckets;
  for (const auto& bucket : plan_.buckets) {
    buckets.push_back(
        {bucket.count, bucket.type, bucket.device, BucketChannel::Op::average, bucket.alone});
  }
  bitmap_ = needs_bitmap();
  const BucketChannel::Bucket used{static_cast<std::int64_t>(parameters_.size()), at::kLong,
                                   at::kCPU, BucketChannel::Op::max};
  const auto group = options_.process_group.c10d();
  const auto device = parameters_.front().tensor.device().type();
  const auto describe = [this](std::size_t bucket) { return describe_bucket(bucket); };
  if (hook_) {
    channel_ = std::make_unique<HookChannel>(group, hook_, buckets, used, describe,
                                             [this](std::size_t b) { return grad_bucket(b); });
  } else {
    if (bitmap_) buckets.push_back(used);
    channel_ = distributed::make_bucket_channel(group, device, buckets, describe);
  }
  make_views();
}

// In the order in which gradients were ready on rank 0 in the first step.
void Reducer::rebuild() {
  rebuild_due_ = false;
  auto order = at::empty({static_cast<std::int64_t>(arrivals_.size())}, at::kLong);
  std::copy(arrivals_.begin(), arrivals_.end(), order.data_ptr<std::int64_t>());
  broadcast_from(0, {order}, options_.process_group);
  const auto* const numbers = order.data_ptr<std::int64_t>();
  const Indices first(numbers, numbers + order.numel());
  if (first == order_ && bitmap_ == needs_bitmap()) return;
  make_plan(first);
  make_channel();
}

void Reducer::make_views() {
  const at::NoGradGuard no_grad;
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    // What lies between gradients is reduced too.
    if (!plan_.buckets[b].alone) channel_->tensor(b).zero_();
    for (const std::size_t i : plan_.buckets[b].parameters) {
      parameters_[i].home =
          alias(channel_->tensor(b), plan_.places[i].offset, parameters_[i].tensor);
      parameters_[i].view = parameters_[i].home;
    }
  }
}

void Reducer::attach_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (std::ranges::count(delayed_, i) > 0) continue;
    Parameter& parameter = parameters_[i];
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.hook = parameter.accumulator->add_post_hook(
        std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [this, i](const torch::autograd::variable_list& outputs,
                      const torch::autograd::variable_list& /*inputs*/) {
              on_gradient(i);
              return outputs;
            }));
  }
}

void Reducer::before_forward(bool synchronise, bool counts) {
  if (channel_->abandon_step()) {
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters_) {
      if (is_view(parameter)) parameter.view.zero_();
    }
  }
  return_adopted();
  backward_ = -1;
  synchronise_ = synchronise;
  if (synchronise && counts) {
    ++forwards_;
    if (rebuild_due_) rebuild();
  }
  channel_->prepare_thread();
  if (synchronise) recorder_.begin_forward();
}

void Reducer::watch_output(const at::Tensor& output) {
  if (!synchronise_ || !output.requires_grad()) return;
  output.register_hook([this](const at::Tensor&) {
    const int backward = torch::autograd::get_current_graph_task_id();
    if (!synchronise_ || backward_ == backward) return;
    backward_ = backward;
    torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
  });
}

void Reducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  hook_ = std::move(hook);
  make_plan(Indices(order_));
  make_channel();
}

void Reducer::on_gradient(std::size_t index) {
  parameters_[index].used = true;
  if (!synchronise_) return;
  try {
    reduce_gradient(index);
  } catch (const PeerError&) {
    // A rank that wakes up late may still write into the buckets.
    detach_gradients();
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
  if (channel_->in_step()) {
    check_backward();
  } else {
    begin_step();
  }
  Parameter& parameter = parameters_[index];
  ++parameter.arrived;
  if (options_.static_graph && learning_) return;
  if (parameter.arrived > parameter.expected) {
    channel_->fail(fmt::format(
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
  channel_->begin_step(forwards_, weight_);
  recorder_.begin_step();
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

// What the first step of a static graph taught: these get no gradient in any.
void Reducer::settle_never_used() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.expected > 0 || parameter.ready) continue;
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
    if (learning_ && std::ranges::count(delayed_, index) == 0) arrivals_.push_back(index);
    take_gradient(index);
    count_down(plan_.places[index].bucket);
  }
  if (trigger_ == index) {
    for (const std::size_t i : delayed_) mark_ready(i);
  }
}

bool Reducer::is_view(const Parameter& parameter) const {
  const at::Tensor& grad = parameter.tensor.grad();
  return grad.defined() && parameter.view.defined() && grad.data_ptr() == parameter.view.data_ptr();
}

// Gives the view the value that .grad has; makes it .grad, unless that is not wanted.
void Reducer::take_gradient(std::size_t index) {
  Parameter& parameter = parameters_[index];
  if (is_view(parameter) || adopt_gradient(index)) return;
  const at::NoGradGuard no_grad;
  at::Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.defined()) {
    parameter.view.zero_();
  } else if (lies_like(grad, parameter.view)) {
    std::memcpy(parameter.view.data_ptr(), grad.data_ptr(), grad.nbytes());
    recorder_.add_copy(grad.nbytes());
  } else {
    parameter.view.copy_(grad.is_sparse() ? grad.to_dense() : grad);
    recorder_.add_copy(parameter.view.nbytes());
  }
  if (options_.gradient_as_bucket_view) grad = parameter.view;
}

// Has a large gradient reduced where autograd has put it, if that is in memory that all ranks see.
bool Reducer::adopt_gradient(std::size_t index) {
  Parameter& parameter = parameters_[index];
  const std::size_t bucket = plan_.places[index].bucket;
  const at::Tensor& grad = parameter.tensor.grad();
  // One that did not come in this step may have to stay as it is.
  if (!plan_.buckets[bucket].alone || parameter.arrived == 0 || !grad.defined()) return false;
  if (!lies_like(grad, parameter.home) || !channel_->adopt(bucket, grad)) return false;
  parameter.view = grad;
  adopted_.push_back(index);
  return true;
}

void Reducer::return_adopted() {
  for (const std::size_t i : adopted_) parameters_[i].view = parameters_[i].home;
  adopted_.clear();
}

void Reducer::count_down(std::size_t bucket) {
  if (--outstanding_[bucket] == 0) publish(bucket);
  channel_->try_progress();
}

void Reducer::publish(std::size_t bucket) {
  recorder_.add_bucket(channel_->tensor(bucket).nbytes());
  channel_->publish(bucket);
}

// The final callback of a backward that began a step; with a static graph, of the outermost.
void Reducer::finish_backward() {
  try {
    if (!channel_->in_step()) begin_step();  // no parameter got a gradient
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
    detach_gradients();
    throw;
  }
  recorder_.end_step(channel_->waits());
  end_step();
}

// How often each parameter gets a gradient is now known, of this rank's graph.
void Reducer::learn_graph() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].expected = parameters_[i].arrived;
    if (parameters_[i].arrived > 0) mark_ready(i);
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
    if (parameters_[i].ready || (!parameters_[i].sparse && skipped[plan_.places[i].bucket]))
      continue;
    mark_ready(i);
  }
  used_.assign(parameters_.size(), false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) used_[i] = parameters_[i].used;
  finish_channel();
  for (std::size_t k = 0; k < missing.size(); ++k) {
    if (!used_[missing[k]]) parameters_[missing[k]].tensor.mutable_grad() = before[k];
  }
  reduce_sparse();
  if (!options_.gradient_as_bucket_view) put_back();
}

// With skip_all_reduce_unused_params, buckets of which no parameter was used: all but the last one
// of the channel, which carries more than gradients.
std::vector<bool> Reducer::skip_unused() {
  std::vector<bool> skipped(plan_.buckets.size());
  if (!options_.skip_all_reduce_unused_params) return skipped;
  const std::size_t last = bitmap_ ? plan_.buckets.size() : plan_.buckets.size() - 1;
  for (std::size_t b = 0; b < last; ++b) {
    skipped[b] = std::ranges::none_of(plan_.buckets[b].parameters,
                                      [&](std::size_t i) { return parameters_[i].ready; });
    if (skipped[b]) channel_->skip(b);
  }
  return skipped;
}

// Tells and asks which parameters were used, where the channel has a place for it.
void Reducer::finish_channel() {
  if (!bitmap_) return channel_->finish();
  const std::size_t bitmap = plan_.buckets.size();
  auto* const used = channel_->tensor(bitmap).data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < used_.size(); ++i) used[i] = used_[i] ? 1 : 0;
  publish(bitmap);
  channel_->finish();
  for (std::size_t i = 0; i < used_.size(); ++i) used_[i] = used[i] != 0;
}

// One call for each, in the order of the parameters.
void Reducer::reduce_sparse() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].sparse || !used_[i]) continue;
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    const at::Tensor& whole = parameters_[i].tensor;
    at::Tensor part = !grad.defined()
                          ? at::empty(whole.sizes(), whole.options().layout(at::kSparse))
                      : grad.is_sparse() ? grad
                                         : grad.to_sparse(1);
    part = part.coalesce().mul(channel_->share());
    all_reduce(part, {.group = options_.process_group});
    grad = part;
  }
}

// For those who want gradients of their own.
void Reducer::put_back() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    if (parameter.sparse || !used_[i] || is_view(parameter)) continue;
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (grad.defined() && !grad.is_sparse()) {
      grad.copy_(parameter.view);
    } else {
      grad = parameter.view.clone();
    }
  }
}

void Reducer::end_step() {
  return_adopted();
  backward_ = -1;
  for (auto& parameter : parameters_) parameter.used = false;
  weight_.reset();
  if (!learning_) return;
  learning_ = false;
  if (options_.static_graph) used_anywhere_ = used_;
  // Where steps may differ, the first says nothing of the next.
  rebuild_due_ = options_.static_graph || !options_.find_unused_parameters;
}

void Reducer::shadow_backward() {
  const at::NoGradGuard no_grad;
  channel_->begin_step(forwards_, weight_);
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    channel_->tensor(b).zero_();
    channel_->publish(b);
    channel_->try_progress();
  }
  used_.assign(parameters_.size(), false);
  finish_channel();
  if (!bitmap_) used_.assign(parameters_.size(), true);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.sparse && used_[i]) {
      all_reduce(
          at::empty(parameter.tensor.sizes(), parameter.tensor.options().layout(at::kSparse)),
          {.group = options_.process_group});
    }
    if (learning_ && options_.static_graph) parameter.expected = used_[i] ? 1 : 0;
  }
  if (learning_) arrivals_ = order_;
  end_step();
}

void Reducer::fail_missing(const Indices& missing) {
  channel_->fail(fmt::format(
      "{} of {} parameters got no gradient in this backward: {}. {}", missing.size(),
      parameters_.size(), names_of(missing),
      options_.static_graph
          ? "In the first step they did, so the graph is not static as static_graph says."
          : "If that is meant, set find_unused_parameters; else make every output that these "
            "parameters feed part of the loss."));
}

void Reducer::detach_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    if (is_view(parameter)) parameter.tensor.mutable_grad() = parameter.view.clone();
  }
}

c10d::GradBucket Reducer::grad_bucket(std::size_t index) const {
  const auto& bucket = plan_.buckets[index];
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> tensors;
  for (const std::size_t i : bucket.parameters) {
    const at::Tensor& tensor = parameters_[i].tensor;
    offsets.push_back(static_cast<std::size_t>(plan_.places[i].offset));
    lengths.push_back(static_cast<std::size_t>(tensor.numel()));
    sizes.push_back(tensor.sizes());
    tensors.push_back(tensor);
  }
  return c10d::GradBucket(index, plan_.buckets.size(), channel_->tensor(index), offsets, lengths,
                          sizes, tensors, std::nullopt);
}

std::string Reducer::describe_bucket(std::size_t bucket) const {
  if (bucket >= plan_.buckets.size()) return "which parameters were used";
  return names_of(plan_.buckets[bucket].parameters);
}

std::string Reducer::names_of(const Indices& parameters) const {
  std::string names;
  for (std::size_t k = 0; k < parameters.size() && k < kMaxNames; ++k) {
    names += (k == 0 ? "" : ", ") + parameters_[parameters[k]].name;
  }
  if (parameters.size() > kMaxNames) {
    names += fmt::format(" and {} more", parameters.size() - kMaxNames);
  }
  return names;
}

}  // namespace paceline::ddp
