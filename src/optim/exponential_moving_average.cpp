#include <paceline/exponential_moving_average.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <exception>
#include <map>

#include <paceline/error.h>

#include "optim/state_archive.h"

namespace paceline::optim {
namespace {

constexpr const char* kAverage = "ExponentialMovingAverage";
constexpr const char* kModulePrefix = "module.";

bool is_inexact(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

}  // namespace

class ExponentialMovingAverage::Impl {
 public:
  explicit Impl(const ExponentialMovingAverageOptions& options) : options_(options) {
    if (options.decay >= 0 && options.decay <= 1) return;
    throw UsageError(fmt::format("{}: decay is {}; it must be in [0, 1]", kAverage, options.decay));
  }

  void add(const std::string& name, const at::Tensor& tensor, bool is_buffer);
  void update();
  void apply();
  void restore() noexcept;
  at::IValue state_dict() const;
  void load_state_dict(const at::IValue& value);

  std::int64_t n_averaged() const { return n_averaged_; }
  torch::OrderedDict<std::string, at::Tensor> averages() const {
    torch::OrderedDict<std::string, at::Tensor> all;
    for (const auto& [name, index] : names_) all.insert(name, averages_[index]);
    return all;
  }

 private:
  static void copy(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  std::vector<at::Tensor> read_averages(const StateArchive& state) const;

  ExponentialMovingAverageOptions options_;
  std::int64_t n_averaged_ = 0;
  // A tensor may have several names.
  std::vector<std::pair<std::string, std::size_t>> names_;
  std::vector<at::Tensor> tensors_;  // the model's, detached
  std::vector<at::Tensor> averages_;
  std::vector<bool> is_averaged_;  // not copied
  std::map<const void*, std::size_t> index_of_;
  std::vector<at::Tensor> own_values_;  // of the model, while the averages are applied
  bool is_applied_ = false;
};

void ExponentialMovingAverage::Impl::add(const std::string& name, const at::Tensor& tensor,
                                         bool is_buffer) {
  if (!tensor.defined()) return;
  if (tensor.layout() != at::kStrided) {
    throw UsageError(
        fmt::format("{}: '{}' is not dense; average dense tensors only", kAverage, name));
  }
  const auto [found, is_new] = index_of_.emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
  names_.emplace_back(name, found->second);
  if (!is_new) return;
  tensors_.push_back(tensor);
  averages_.push_back(tensor.detach().clone());
  is_averaged_.push_back(!is_buffer || options_.use_buffers);
}

void ExponentialMovingAverage::Impl::update() {
  if (is_applied_) {
    throw UsageError(fmt::format(
        "{}: update while the averages are applied; destroy what apply returned first", kAverage));
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (n_averaged_ == 0 || !is_averaged_[i]) {
      averages_[i].copy_(tensors_[i]);
    } else if (is_inexact(averages_[i])) {
      averages.push_back(averages_[i]);
      values.push_back(tensors_[i].detach());
    } else {
      averages_[i].copy_(averages_[i] * options_.decay + tensors_[i] * (1 - options_.decay));
    }
  }
  if (!averages.empty()) at::_foreach_lerp_(averages, values, 1 - options_.decay);
  ++n_averaged_;
}

void ExponentialMovingAverage::Impl::apply() {
  if (is_applied_) throw UsageError(fmt::format("{}: the averages are applied already", kAverage));
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> own_values;
  for (const at::Tensor& tensor : tensors_) own_values.push_back(tensor.detach().clone());
  try {
    copy(tensors_, averages_);
  } catch (...) {
    copy(tensors_, own_values);
    throw;
  }
  own_values_ = std::move(own_values);
  is_applied_ = true;
}

void ExponentialMovingAverage::Impl::restore() noexcept {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    try {
      tensors_[i].copy_(own_values_[i]);
    } catch (const std::exception&) {
      // The program has given this tensor another shape, and so other values, meanwhile.
    }
  }
  own_values_.clear();
  is_applied_ = false;
}

at::IValue ExponentialMovingAverage::Impl::state_dict() const {
  GenericDict state = empty_state();
  state.insert("n_averaged", at::scalar_tensor(n_averaged_, at::kLong));
  for (const auto& [name, index] : names_) state.insert(kModulePrefix + name, averages_[index]);
  return state;
}

std::vector<at::Tensor> ExponentialMovingAverage::Impl::read_averages(
    const StateArchive& state) const {
  std::vector<at::Tensor> averages(averages_.size());
  for (const auto& [name, index] : names_) {
    const std::string key = kModulePrefix + name;
    const at::IValue value = state.at(key.c_str());
    const at::Tensor& own = averages_[index];
    if (!value.isTensor() || !value.toTensor().defined() ||
        value.toTensor().layout() != at::kStrided || value.toTensor().sizes() != own.sizes()) {
      state.reject(fmt::format("'{}' must be a dense tensor with the shape of the model's", key));
    }
    if (value.toTensor().is_complex() && !own.is_complex()) {
      state.reject(fmt::format("'{}' is complex, and the model's tensor is real", key));
    }
    averages[index] = value.toTensor();
  }
  if (state.dict().size() != names_.size() + 1) {
    state.reject(fmt::format("it has {} names, and this model with n_averaged {}",
                             state.dict().size(), names_.size() + 1));
  }
  return averages;
}

void ExponentialMovingAverage::Impl::load_state_dict(const at::IValue& value) {
  StateArchive state(kAverage, value);
  std::int64_t n_averaged = 0;
  state("n_averaged", n_averaged);
  if (n_averaged < 0) state.reject(fmt::format("'n_averaged' is {}", n_averaged));
  const auto averages = read_averages(state);
  const at::NoGradGuard no_grad;
  copy(averages_, averages);
  n_averaged_ = n_averaged;
}

ExponentialMovingAverage::ExponentialMovingAverage(const torch::nn::Module& module,
                                                   const ExponentialMovingAverageOptions& options)
    : impl_(std::make_shared<Impl>(options)) {
  for (const auto& one : module.named_parameters()) impl_->add(one.key(), one.value(), false);
  for (const auto& one : module.named_buffers()) impl_->add(one.key(), one.value(), true);
}

ExponentialMovingAverage::ExponentialMovingAverage(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters,
    const ExponentialMovingAverageOptions& options)
    : impl_(std::make_shared<Impl>(options)) {
  for (const auto& [name, tensor] : parameters) impl_->add(name, tensor, false);
}

ExponentialMovingAverage::~ExponentialMovingAverage() = default;
ExponentialMovingAverage::ExponentialMovingAverage(ExponentialMovingAverage&& other) noexcept =
    default;
ExponentialMovingAverage& ExponentialMovingAverage::operator=(
    ExponentialMovingAverage&& other) noexcept = default;

void ExponentialMovingAverage::update() {
  impl_->update();
}

std::int64_t ExponentialMovingAverage::n_averaged() const {
  return impl_->n_averaged();
}

torch::OrderedDict<std::string, at::Tensor> ExponentialMovingAverage::averages() const {
  return impl_->averages();
}

ExponentialMovingAverage::Applied ExponentialMovingAverage::apply() {
  return Applied(impl_);
}

at::IValue ExponentialMovingAverage::state_dict() const {
  return impl_->state_dict();
}

void ExponentialMovingAverage::load_state_dict(const at::IValue& state) {
  impl_->load_state_dict(state);
}

ExponentialMovingAverage::Applied::Applied(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->apply();
}

ExponentialMovingAverage::Applied::~Applied() {
  impl_->restore();
}

}  // namespace paceline::optim
