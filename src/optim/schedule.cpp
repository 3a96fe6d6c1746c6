#include "optim/schedule.h"

#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <paceline/error.h>

namespace paceline::optim {

void Schedule::visit_rates(StateArchive& state, const char* name,
                           std::vector<double>& rates) const {
  state(name, rates);
  const std::size_t groups = optimizer_->param_groups().size();
  if (rates.size() != groups) {
    state.reject(
        fmt::format("'{}' has {} values, and the optimizer {} groups", name, rates.size(), groups));
  }
}

void EpochSchedule::begin() {
  advance(RateInputs::Form::initial, last_epoch_ + 1);
  step_count_ = 1;
}

void EpochSchedule::step() {
  advance(RateInputs::Form::next, last_epoch_ + 1);
  ++step_count_;
}

void EpochSchedule::advance(RateInputs::Form form, std::int64_t epoch) {
  std::vector<double> rates = learning_rates(optimizer());
  if (rates.size() != base_lrs_.size()) {
    throw UsageError(fmt::format(
        "{}: the optimizer has {} groups, and had {} when the schedule was made; add groups before "
        "you make it",
        name(), rates.size(), base_lrs_.size()));
  }
  for (std::size_t group = 0; group < rates.size(); ++group) {
    rates[group] = lr_at({form, epoch, group, rates[group], base_lrs_[group]});
  }
  set_momenta(epoch);
  set_learning_rates(optimizer(), rates);
  last_lr_ = std::move(rates);
  last_epoch_ = epoch;
}

void EpochSchedule::visit(StateArchive& state) {
  visit_rates(state, "base_lrs", base_lrs_);
  state("last_epoch", last_epoch_);
  state("_step_count", step_count_);
  if (!state.reads()) {  // what Python has between two calls
    state.insert("_is_initial", false);
    state.insert("_get_lr_called_within_step", false);
  }
  visit_rates(state, "_last_lr", last_lr_);
}

std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void set_learning_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates) {
  for (std::size_t i = 0; i < rates.size(); ++i) {
    optimizer.param_groups()[i].options().set_lr(rates[i]);
  }
}

void check_per_group(const char* name, std::size_t values, std::size_t groups) {
  if (values == 1 || values == groups) return;
  throw UsageError(fmt::format("{} has {} values; give one, or one for each of the {} groups", name,
                               values, groups));
}

}  // namespace paceline::optim
