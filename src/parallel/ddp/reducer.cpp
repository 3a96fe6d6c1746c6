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

#include <paceline/error.h>

namespace paceline::ddp {
namespace {

constexpr std::size_t kFirstBucketBytes = std::size_t{1} << 20;
// How many parameters an error lists before it only counts.
constexpr std::size_t kMaxNames = 10;

std::size_t bytes_of_mb(double mb) {
  constexpr double kMost = 1ULL << 62;
  return static_cast<std::size_t>(std::min(mb * 1024 * 1024, kMost));
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& one : parameters) tensors.push_back(one.tensor);
  return tensors;
}

// A tensor over part of `flat` that autograd does not take for a view, since zero_grad refuses to
// detach those.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const bool dense = like.is_non_overlapping_and_dense();
  at::Tensor result = at::empty({0}, flat.options());
  return result.set_(flat.storage(), flat.storage_offset() + offset, like.sizes(),
                     dense ? like.strides() : at::empty_like(like).strides());
}

}  // namespace

Reducer::Reducer(const std::vector<NamedTensor>& parameters, const DdpOptions& options)
    : find_unused_(options.find_unused_parameters),
      plan_(plan_buckets(tensors_of(parameters),
                         std::min(kFirstBucketBytes, bytes_of_mb(options.bucket_cap_mb)),
                         bytes_of_mb(options.bucket_cap_mb))) {
  using distributed::BucketChannel;
  std::vector<BucketChannel::Bucket> buckets;
  for (const auto& bucket : plan_.buckets) {
    buckets.push_back({bucket.count, bucket.type, bucket.device, BucketChannel::Op::average});
  }
  if (find_unused_) {
    buckets.push_back({static_cast<std::int64_t>(parameters.size()), at::kLong, at::kCPU,
                       BucketChannel::Op::max});
  }
  for (const auto& [name, tensor] : parameters) parameters_.push_back({name, tensor, {}, nullptr});
  channel_ = distributed::make_bucket_channel(
      options.process_group.c10d(), plan_.buckets.front().device.type(), buckets,
      [this](std::size_t bucket) { return describe_bucket(bucket); });
  make_views();
  attach_hooks();
}

Reducer::~Reducer() {
  for (auto& parameter : parameters_) {
    if (parameter.accumulator) parameter.accumulator->del_post_hook(parameter.hook);
  }
}

void Reducer::make_views() {
  const at::NoGradGuard no_grad;
  for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
    channel_->tensor(b).zero_();  // what lies between gradients is reduced too
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Place place = plan_.places[i];
    parameters_[i].view =
        alias(channel_->tensor(place.bucket), place.offset, parameters_[i].tensor);
  }
}

void Reducer::attach_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
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
  synchronise_ = synchronise;
  if (synchronise && counts) ++forwards_;
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
  Parameter& parameter = parameters_[index];
  if (channel_->in_step()) {
    check_backward();
  } else {
    begin_step();
  }
  if (parameter.ready) {
    channel_->fail(fmt::format(
        "parameter {} got a gradient twice in one backward: it is part of several graphs, which is "
        "not supported",
        parameter.name));
  }
  parameter.ready = true;
  take_gradient(parameter);
  count_down(plan_.places[index].bucket);
}

// The hooks of a step all belong to one backward.
void Reducer::check_backward() {
  if (torch::autograd::get_current_graph_task_id() == backward_) return;
  throw UsageError(
      "a backward reached the model while its last one has not completed: if that one threw, run a "
      "forward before the next; a backward inside another, as with activation checkpointing, is "
      "not "
      "supported");
}

void Reducer::begin_step() {
  channel_->begin_step(forwards_);
  backward_ = torch::autograd::get_current_graph_task_id();
  outstanding_.clear();
  for (const auto& bucket : plan_.buckets) outstanding_.push_back(bucket.parameters.size());
  for (auto& parameter : parameters_) parameter.ready = false;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish_backward(); });
}

bool Reducer::is_view(const Parameter& parameter) const {
  const at::Tensor& grad = parameter.tensor.grad();
  return grad.defined() && grad.data_ptr() == parameter.view.data_ptr();
}

// Makes .grad the view, with the value that .grad has.
void Reducer::take_gradient(Parameter& parameter) {
  if (is_view(parameter)) return;
  const at::NoGradGuard no_grad;
  at::Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.defined()) {
    parameter.view.zero_();
  } else if (grad.layout() == at::kStrided && grad.scalar_type() == parameter.view.scalar_type() &&
             grad.strides() == parameter.view.strides() && grad.is_non_overlapping_and_dense()) {
    std::memcpy(parameter.view.data_ptr(), grad.data_ptr(), grad.nbytes());
  } else {
    parameter.view.copy_(grad.is_sparse() ? grad.to_dense() : grad);
  }
  grad = parameter.view;
}

void Reducer::count_down(std::size_t bucket) {
  if (--outstanding_[bucket] == 0) channel_->publish(bucket);
  channel_->try_progress();
}

// The final callback of a backward that began a step.
void Reducer::finish_backward() {
  try {
    std::vector<std::size_t> missing;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].ready) missing.push_back(i);
    }
    if (find_unused_) {
      settle_unused(missing);
    } else {
      if (!missing.empty()) fail_missing(missing);
      channel_->finish();
    }
  } catch (...) {
    detach_gradients();
    throw;
  }
  for (auto& parameter : parameters_) parameter.used = false;
}

void Reducer::settle_unused(const std::vector<std::size_t>& missing) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  for (const std::size_t i : missing) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& grad = parameter.tensor.grad();
    before.push_back(is_view(parameter) ? grad.clone() : grad);
    take_gradient(parameter);
    count_down(plan_.places[i].bucket);
  }
  const std::size_t bitmap = plan_.buckets.size();
  auto* const used = channel_->tensor(bitmap).data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < parameters_.size(); ++i) used[i] = parameters_[i].used ? 1 : 0;
  channel_->publish(bitmap);
  channel_->finish();
  for (std::size_t k = 0; k < missing.size(); ++k) {
    if (used[missing[k]] == 0) parameters_[missing[k]].tensor.mutable_grad() = before[k];
  }
}

void Reducer::fail_missing(const std::vector<std::size_t>& missing) {
  channel_->fail(fmt::format(
      "{} of {} parameters got no gradient in this backward: {}. If that is meant, set "
      "find_unused_parameters; else make every output that these parameters feed part of the loss.",
      missing.size(), parameters_.size(), names_of(missing)));
}

void Reducer::detach_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    if (is_view(parameter)) parameter.tensor.mutable_grad() = parameter.view.clone();
  }
}

std::string Reducer::describe_bucket(std::size_t bucket) const {
  if (bucket >= plan_.buckets.size()) return "which parameters were used";
  return names_of(plan_.buckets[bucket].parameters);
}

std::string Reducer::names_of(const std::vector<std::size_t>& parameters) const {
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
