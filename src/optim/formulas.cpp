// The schedules with a formula for each epoch. The operations and their order are Python's, so that
// the rates have the same bits.
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <map>
#include <numbers>
#include <utility>
#include <variant>

#include <paceline/error.h>

#include "optim/schedule.h"

namespace paceline::optim {
namespace {

using Form = RateInputs::Form;
using std::numbers::pi;

void check_finite(const char* name, double value) {
  if (std::isfinite(value)) return;
  throw UsageError(fmt::format("{} is {}; it must be finite", name, value));
}
void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw UsageError(fmt::format("{} is {}; it must be at least {}", name, value, least));
}
void check_factor(const char* name, double value, bool zero_too) {
  if (value <= 1 && (value > 0 || (zero_too && value == 0))) return;
  throw UsageError(
      fmt::format("{} is {}; it must be in {}0, 1]", name, value, zero_too ? "[" : "("));
}

constexpr const char* kStepLR = "StepLR";
void check(const StepLROptions& options, std::size_t /*groups*/) {
  check_at_least("StepLR: step_size", options.step_size, 1);
  check_finite("StepLR: gamma", options.gamma);
}
void visit(StepLROptions& options, StateArchive& state) {
  state("step_size", options.step_size);
  state("gamma", options.gamma);
}
double lr_at(const StepLROptions& options, const RateInputs& at) {
  if (at.form == Form::closed) return at.base_lr;
  return at.epoch == 0 || at.epoch % options.step_size != 0 ? at.lr : at.lr * options.gamma;
}

// The options as Python keeps them: how often each epoch comes.
struct CountedMilestones {
  std::map<std::int64_t, std::int64_t> milestones;
  double gamma;
};
constexpr const char* kMultiStepLR = "MultiStepLR";
void check(const CountedMilestones& options, std::size_t /*groups*/) {
  for (const auto& one : options.milestones) {
    check_at_least("MultiStepLR: a milestone", one.first, 0);
    check_at_least("MultiStepLR: the count of a milestone", one.second, 0);
  }
  check_finite("MultiStepLR: gamma", options.gamma);
}
void visit(CountedMilestones& options, StateArchive& state) {
  state("milestones", options.milestones);
  state("gamma", options.gamma);
}
double lr_at(const CountedMilestones& options, const RateInputs& at) {
  const auto found = options.milestones.find(at.epoch);
  const double lr = at.form == Form::closed ? at.base_lr : at.lr;
  if (found == options.milestones.end()) return lr;
  return lr * std::pow(options.gamma, static_cast<double>(found->second));
}

constexpr const char* kConstantLR = "ConstantLR";
void check(const ConstantLROptions& options, std::size_t /*groups*/) {
  check_factor("ConstantLR: factor", options.factor, false);
  check_at_least("ConstantLR: total_iters", options.total_iters, 0);
}
void visit(ConstantLROptions& options, StateArchive& state) {
  state("factor", options.factor);
  state("total_iters", options.total_iters);
}
double lr_at(const ConstantLROptions& options, const RateInputs& at) {
  if (at.form == Form::closed) {
    const double rest = options.total_iters == 0 ? 1 - options.factor : 0;
    return at.base_lr * (options.factor + rest);
  }
  if (at.epoch == 0) return at.lr * options.factor;
  return at.epoch == options.total_iters ? at.lr * (1.0 / options.factor) : at.lr;
}

constexpr const char* kLinearLR = "LinearLR";
void check(const LinearLROptions& options, std::size_t /*groups*/) {
  check_factor("LinearLR: start_factor", options.start_factor, false);
  check_factor("LinearLR: end_factor", options.end_factor, true);
  check_at_least("LinearLR: total_iters", options.total_iters, 0);
}
void visit(LinearLROptions& options, StateArchive& state) {
  state("start_factor", options.start_factor);
  state("end_factor", options.end_factor);
  state("total_iters", options.total_iters);
}
double lr_at(const LinearLROptions& options, const RateInputs& at) {
  if (at.form == Form::closed) return at.base_lr * options.start_factor;
  if (at.epoch == 0) return at.lr * options.start_factor;
  if (at.form == Form::initial || at.epoch > options.total_iters) return at.lr;
  const double change = options.end_factor - options.start_factor;
  return at.lr * (1.0 + change / (static_cast<double>(options.total_iters) * options.start_factor +
                                  static_cast<double>(at.epoch - 1) * change));
}

constexpr const char* kPolynomialLR = "PolynomialLR";
void check(const PolynomialLROptions& options, std::size_t /*groups*/) {
  check_at_least("PolynomialLR: total_iters", options.total_iters, 0);
  check_finite("PolynomialLR: power", options.power);
  if (options.power < 0) {
    throw UsageError(
        fmt::format("PolynomialLR: power is {}; it must not be negative", options.power));
  }
}
void visit(PolynomialLROptions& options, StateArchive& state) {
  state("total_iters", options.total_iters);
  state("power", options.power);
}
double lr_at(const PolynomialLROptions& options, const RateInputs& at) {
  if (at.form == Form::closed) return at.base_lr;
  if (at.form == Form::initial || at.epoch > options.total_iters) return at.lr;
  const auto left = [&](std::int64_t epoch) {
    return 1.0 - static_cast<double>(epoch) / static_cast<double>(options.total_iters);
  };
  return at.lr * std::pow(left(at.epoch) / left(at.epoch - 1), options.power);
}

constexpr const char* kCosineAnnealingLR = "CosineAnnealingLR";
void check(const CosineAnnealingLROptions& options, std::size_t /*groups*/) {
  check_at_least("CosineAnnealingLR: T_max", options.T_max, 1);
  check_finite("CosineAnnealingLR: eta_min", options.eta_min);
}
void visit(CosineAnnealingLROptions& options, StateArchive& state) {
  state("T_max", options.T_max);
  state("eta_min", options.eta_min);
}
double lr_at(const CosineAnnealingLROptions& options, const RateInputs& at) {
  const auto t_max = static_cast<double>(options.T_max);
  const double range = at.base_lr - options.eta_min;
  switch (at.form) {
    case Form::initial:
      return at.lr;
    case Form::closed:
      return options.eta_min + range * (1 + std::cos(0.0)) / 2;
    case Form::next:
      break;
  }
  // After a minimum the quotient below would divide by zero.
  if ((at.epoch - 1 - options.T_max) % (2 * options.T_max) == 0) {
    return at.lr + range * (1 - std::cos(pi / t_max)) / 2;
  }
  const auto height = [&](std::int64_t epoch) {
    return 1 + std::cos(pi * static_cast<double>(epoch) / t_max);
  };
  return height(at.epoch) / height(at.epoch - 1) * (at.lr - options.eta_min) + options.eta_min;
}

constexpr const char* kLambdaLR = "LambdaLR";
void check(const LambdaLROptions& options, std::size_t groups) {
  check_per_group("LambdaLR: lr_lambda", options.lr_lambda.size(), groups);
  for (const auto& function : options.lr_lambda) {
    if (!function) throw UsageError("LambdaLR: lr_lambda has an empty function; give a callable");
  }
}
void visit(LambdaLROptions& options, StateArchive& state) {
  if (state.reads()) {
    const at::IValue functions = state.at("lr_lambdas");  // Python saves no functions
    if (!functions.isList() || functions.toListRef().size() != options.lr_lambda.size()) {
      state.reject(fmt::format("'lr_lambdas' is no list of {}", options.lr_lambda.size()));
    }
    return;
  }
  GenericList none = empty_list();
  for (std::size_t i = 0; i < options.lr_lambda.size(); ++i) none.push_back(at::IValue());
  state.insert("lr_lambdas", none);
}
double lr_at(const LambdaLROptions& options, const RateInputs& at) {
  return at.base_lr * options.lr_lambda[at.group](at.epoch);
}

template <typename Options>
class FormulaSchedule final : public EpochSchedule {
 public:
  FormulaSchedule(torch::optim::Optimizer& optimizer, const char* name,
                  const std::vector<double>& base_lrs, Options options)
      : EpochSchedule(optimizer, name, base_lrs), options_(std::move(options)) {
    check(options_, base_lrs.size());
  }

  std::unique_ptr<EpochSchedule> copy() const override {
    return std::make_unique<FormulaSchedule>(*this);
  }
  void visit(StateArchive& state) override {
    optim::visit(options_, state);
    EpochSchedule::visit(state);
    if (state.reads()) check(options_, base_lrs().size());
  }

 protected:
  double lr_at(const RateInputs& at) const override { return optim::lr_at(options_, at); }

 private:
  Options options_;
};

// Makes the schedule of each kind of options.
class ScheduleMaker {
 public:
  ScheduleMaker(torch::optim::Optimizer& optimizer, std::vector<double>& initial_lrs)
      : optimizer_(optimizer), initial_lrs_(initial_lrs) {}

  auto operator()(const StepLROptions& options) { return made(kStepLR, options); }
  auto operator()(const MultiStepLROptions& options) {
    CountedMilestones counted{{}, options.gamma};
    for (const std::int64_t epoch : options.milestones) ++counted.milestones[epoch];
    return made(kMultiStepLR, counted);
  }
  auto operator()(const ConstantLROptions& options) { return made(kConstantLR, options); }
  auto operator()(const LinearLROptions& options) { return made(kLinearLR, options); }
  auto operator()(const PolynomialLROptions& options) { return made(kPolynomialLR, options); }
  auto operator()(const CosineAnnealingLROptions& options) {
    return made(kCosineAnnealingLR, options);
  }
  auto operator()(const LambdaLROptions& options) {
    LambdaLROptions each = options;
    if (each.lr_lambda.size() == 1) each.lr_lambda.resize(initial_lrs_.size(), each.lr_lambda[0]);
    return made(kLambdaLR, each);
  }
  std::unique_ptr<EpochSchedule> operator()(const OneCycleLROptions& options) {
    return make_one_cycle(optimizer_, initial_lrs_, options);
  }

 private:
  template <typename Options>
  std::unique_ptr<EpochSchedule> made(const char* name, const Options& options) {
    return std::make_unique<FormulaSchedule<Options>>(optimizer_, name, initial_lrs_, options);
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<double>& initial_lrs_;
};

}  // namespace

std::unique_ptr<EpochSchedule> make_schedule(torch::optim::Optimizer& optimizer,
                                             std::vector<double>& initial_lrs,
                                             const ScheduleOptions& options) {
  return std::visit(ScheduleMaker(optimizer, initial_lrs), options);
}

}  // namespace paceline::optim
