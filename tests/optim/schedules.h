#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/lr_scheduler.h>

// The schedules of schedules.py.
namespace paceline::optim::test {

using AnyOptions = std::variant<ScheduleOptions, SequentialLROptions>;

inline constexpr int kSavedAfter = 7;

inline const std::map<std::string, AnyOptions>& schedules() {
  static const std::map<std::string, AnyOptions> all{
      {"step", StepLROptions{.step_size = 3, .gamma = 0.7}},
      {"multi_step", MultiStepLROptions{.milestones = {9, 2, 2, 30}, .gamma = 0.3}},
      {"constant", ConstantLROptions{.factor = 0.3, .total_iters = 8}},
      {"constant_for_no_epoch", ConstantLROptions{.factor = 0.3, .total_iters = 0}},
      {"linear", LinearLROptions{.start_factor = 0.01, .end_factor = 0.9, .total_iters = 11}},
      {"linear_to_zero", LinearLROptions{.start_factor = 1, .end_factor = 0, .total_iters = 9}},
      {"polynomial", PolynomialLROptions{.total_iters = 17, .power = 1.7}},
      {"cosine", CosineAnnealingLROptions{.T_max = 13, .eta_min = 0.003}},
      {"cosine_of_one", CosineAnnealingLROptions{.T_max = 1}},
      {"one_cycle", OneCycleLROptions{.max_lr = {0.4, 0.9}, .total_steps = 40}},
      {"one_cycle_linear", OneCycleLROptions{.max_lr = {0.4},
                                             .epochs = 8,
                                             .steps_per_epoch = 5,
                                             .pct_start = 0.25,
                                             .anneal_strategy = "linear",
                                             .base_momentum = {0.7, 0.75},
                                             .max_momentum = {0.9},
                                             .div_factor = 10,
                                             .final_div_factor = 100}},
      {"one_cycle_three_phases",
       OneCycleLROptions{
           .max_lr = {0.4}, .total_steps = 50, .pct_start = 0.2, .three_phase = true}},
      {"one_cycle_without_momentum",
       OneCycleLROptions{.max_lr = {0.4}, .total_steps = 45, .cycle_momentum = false}},
      {"lambda",
       LambdaLROptions{{[](std::int64_t epoch) { return std::pow(0.95, epoch); },
                        [](std::int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); }}}},
      {"warm_up_and_cosine",
       SequentialLROptions{.schedulers = {LinearLROptions{.start_factor = 0.1, .total_iters = 5},
                                          CosineAnnealingLROptions{.T_max = 30, .eta_min = 0.001}},
                           .milestones = {5}}},
      {"sequence_of_all",
       SequentialLROptions{.schedulers = {ConstantLROptions{.factor = 0.5, .total_iters = 3},
                                          StepLROptions{.step_size = 2, .gamma = 0.9},
                                          MultiStepLROptions{.milestones = {0, 2}, .gamma = 0.8},
                                          PolynomialLROptions{.total_iters = 6, .power = 2},
                                          LambdaLROptions{{[](std::int64_t epoch) {
                                            return std::pow(0.9, epoch);
                                          }}},
                                          LinearLROptions{}},
                           .milestones = {4, 9, 14, 20, 26}}},
      {"sequence_that_skips",
       SequentialLROptions{.schedulers = {LinearLROptions{}, StepLROptions{.step_size = 4}},
                           .milestones = {0}}},
      {"sequence_with_one_cycle",
       SequentialLROptions{.schedulers = {ConstantLROptions{.factor = 0.5, .total_iters = 20},
                                          OneCycleLROptions{.max_lr = {0.4}, .total_steps = 30}},
                           .milestones = {10}}},
  };
  return all;
}

struct MakeSchedule {
  torch::optim::Optimizer& optimizer;

  template <typename Schedule, typename Options>
  std::unique_ptr<LRScheduler> made(const Options& options) const {
    return std::make_unique<Schedule>(optimizer, options);
  }
  auto operator()(const StepLROptions& options) const { return made<StepLR>(options); }
  auto operator()(const MultiStepLROptions& options) const { return made<MultiStepLR>(options); }
  auto operator()(const ConstantLROptions& options) const { return made<ConstantLR>(options); }
  auto operator()(const LinearLROptions& options) const { return made<LinearLR>(options); }
  auto operator()(const PolynomialLROptions& options) const { return made<PolynomialLR>(options); }
  auto operator()(const CosineAnnealingLROptions& options) const {
    return made<CosineAnnealingLR>(options);
  }
  auto operator()(const OneCycleLROptions& options) const { return made<OneCycleLR>(options); }
  auto operator()(const LambdaLROptions& options) const { return made<LambdaLR>(options); }
  auto operator()(const SequentialLROptions& options) const { return made<SequentialLR>(options); }
  auto operator()(const ScheduleOptions& options) const { return std::visit(*this, options); }
};

inline std::unique_ptr<LRScheduler> make_schedule(torch::optim::Optimizer& optimizer,
                                                  const std::string& name) {
  return std::visit(MakeSchedule{optimizer}, schedules().at(name));
}

template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> with_two_groups(const Options& first,
                                                         const Options& second) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{torch::zeros({2}, at::requires_grad())},
                      std::make_unique<Options>(first));
  groups.emplace_back(std::vector{torch::zeros({3}, at::requires_grad())},
                      std::make_unique<Options>(second));
  return std::make_unique<Optimizer>(groups, first);
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind) {
  using namespace torch::optim;
  if (kind == "adam") return with_two_groups<Adam>(AdamOptions(0.1), AdamOptions(0.35));
  if (kind == "adamw")
    return with_two_groups<torch::optim::AdamW>(AdamWOptions(0.1), AdamWOptions(0.35));
  return with_two_groups<SGD>(SGDOptions(0.1).momentum(0.9), SGDOptions(0.35).momentum(0.9));
}

inline std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

inline std::vector<double> momenta_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> momenta;
  for (const auto& group : optimizer.param_groups()) {
    using namespace torch::optim;
    if (const auto* sgd = dynamic_cast<const SGDOptions*>(&group.options())) {
      momenta.push_back(sgd->momentum());
    } else if (const auto* adam = dynamic_cast<const AdamOptions*>(&group.options())) {
      momenta.push_back(std::get<0>(adam->betas()));
    } else {
      momenta.push_back(std::get<0>(dynamic_cast<const AdamWOptions&>(group.options()).betas()));
    }
  }
  return momenta;
}

struct ExpectedRates {
  std::string schedule;
  std::string optimizer;
  std::vector<std::vector<double>> rates;    // of each epoch
  std::vector<std::vector<double>> momenta;  // of each epoch
};

inline const std::vector<ExpectedRates>& expected_rates() {
  static const std::vector<ExpectedRates> all{
#include "lr_scheduler_expected.inc"
  };
  return all;
}

}  // namespace paceline::optim::test
