#include <fmt/format.h>
#include <torch/optim.h>

#include <array>
#include <cmath>
#include <map>
#include <numbers>
#include <string_view>
#include <tuple>

#include <paceline/error.h>
#include <paceline/optimizers.h>

#include "optim/schedule.h"

namespace paceline::optim {
namespace {

// From the end of the phase before to its own, between values that have Python's names.
struct CyclePhase {
  double end_step = 0;
  std::string start_lr;
  std::string end_lr;
  std::string start_momentum;
  std::string end_momentum;
};

std::vector<CyclePhase> cycle_phases(const OneCycleLROptions& options, std::int64_t total_steps) {
  const auto steps = static_cast<double>(total_steps);
  const double rise = options.pct_start * steps - 1;
  std::vector<CyclePhase> phases{{rise, "initial_lr", "max_lr", "max_momentum", "base_momentum"}};
  if (options.three_phase) {
    const double fall = 2 * options.pct_start * steps - 2;
    phases.push_back({fall, "max_lr", "initial_lr", "base_momentum", "max_momentum"});
    phases.push_back({steps - 1, "initial_lr", "min_lr", "max_momentum", "max_momentum"});
  } else {
    phases.push_back({steps - 1, "max_lr", "min_lr", "base_momentum", "max_momentum"});
  }
  return phases;
}

void check_positive(const char* name, std::int64_t value) {
  if (value > 0) return;
  throw UsageError(fmt::format("OneCycleLR: {} is {}; it must be at least 1", name, value));
}

std::int64_t total_steps_of(const OneCycleLROptions& options) {
  if (options.total_steps) {
    check_positive("total_steps", *options.total_steps);
    return *options.total_steps;
  }
  if (!options.epochs || !options.steps_per_epoch) {
    throw UsageError("OneCycleLR: set total_steps, or both epochs and steps_per_epoch");
  }
  check_positive("epochs", *options.epochs);
  check_positive("steps_per_epoch", *options.steps_per_epoch);
  return *options.epochs * *options.steps_per_epoch;
}

void check_cycle(const OneCycleLROptions& options) {
  if (!(options.pct_start >= 0 && options.pct_start <= 1)) {
    throw UsageError(
        fmt::format("OneCycleLR: pct_start is {}; it must be in [0, 1]", options.pct_start));
  }
  if (options.anneal_strategy != "cos" && options.anneal_strategy != "linear") {
    throw UsageError(
        fmt::format("OneCycleLR: anneal_strategy is '{}'; it must be 'cos' or 'linear'",
                    options.anneal_strategy));
  }
  for (const double factor : {options.div_factor, options.final_div_factor}) {
    if (std::isfinite(factor) && factor > 0) continue;
    throw UsageError(fmt::format(
        "OneCycleLR: div_factor is {} and final_div_factor is {}; both must be finite and above 0",
        options.div_factor, options.final_div_factor));
  }
}

// One value for each group.
std::vector<double> per_group(const char* name, std::vector<double> values, std::size_t groups) {
  check_per_group(name, values.size(), groups);
  for (const double value : values) {
    if (!std::isfinite(value))
      throw UsageError(fmt::format("{} has {}; it must be finite", name, value));
  }
  values.resize(groups, values[0]);
  return values;
}

// The momentum of options, or beta1; null if they have neither.
struct MomentumOption {
  double* value = nullptr;
  bool is_beta1 = false;
};
MomentumOption momentum_of(torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  if (auto* sgd = dynamic_cast<SGDOptions*>(&options)) return {&sgd->momentum()};
  if (auto* rmsprop = dynamic_cast<RMSpropOptions*>(&options)) return {&rmsprop->momentum()};
  if (auto* muon = dynamic_cast<MuonOptions*>(&options)) return {&muon->momentum()};
  if (auto* adam = dynamic_cast<AdamOptions*>(&options)) return {&std::get<0>(adam->betas()), true};
  if (auto* adamw = dynamic_cast<AdamWOptions*>(&options)) {
    return {&std::get<0>(adamw->betas()), true};
  }
  return {};
}

class OneCycle final : public EpochSchedule {
 public:
  using Bounds = std::map<std::string, std::vector<double>, std::less<>>;

  OneCycle(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options,
           std::vector<double> initial_lrs, Bounds bounds)
      : EpochSchedule(optimizer, "OneCycleLR", std::move(initial_lrs)),
        total_steps_(total_steps_of(options)),
        phases_(cycle_phases(options, total_steps_)),
        anneal_strategy_(options.anneal_strategy),
        cycle_momentum_(options.cycle_momentum),
        use_beta1_(momentum_of(optimizer.defaults()).is_beta1),
        bounds_(std::move(bounds)) {}

  std::unique_ptr<EpochSchedule> copy() const override { return std::make_unique<OneCycle>(*this); }
  void visit(StateArchive& state) override;

 protected:
  double lr_at(const RateInputs& at) const override;
  void set_momenta(std::int64_t epoch) override;

 private:
  // The phase of a step, and how far it is through it.
  std::pair<const CyclePhase&, double> phase_at(std::int64_t step) const;
  double annealed(const std::string& start, const std::string& end, double pct,
                  std::size_t group) const;
  double bound(const std::string& name, std::size_t group) const {
    return name == "initial_lr" ? base_lrs()[group] : bounds_.find(name)->second[group];
  }
  void visit_phases(StateArchive& state);
  void visit_bounds(StateArchive& state);
  void check_read(const StateArchive& state) const;

  std::int64_t total_steps_;
  std::vector<CyclePhase> phases_;
  std::string anneal_strategy_;
  bool cycle_momentum_;
  bool use_beta1_;
  Bounds bounds_;
};

std::pair<const CyclePhase&, double> OneCycle::phase_at(std::int64_t step) const {
  const auto number = static_cast<double>(step);
  double start = 0;
  std::size_t i = 0;
  for (; i + 1 < phases_.size() && number > phases_[i].end_step; ++i) start = phases_[i].end_step;
  const double length = phases_[i].end_step - start;
  return {phases_[i], length == 0 ? 1 : (number - start) / length};  // Python divides by zero
}

double OneCycle::annealed(const std::string& start, const std::string& end, double pct,
                          std::size_t group) const {
  const double from = bound(start, group);
  const double to = bound(end, group);
  if (anneal_strategy_ == "linear") return (to - from) * pct + from;
  return to + (from - to) / 2.0 * (std::cos(std::numbers::pi * pct) + 1);
}

double OneCycle::lr_at(const RateInputs& at) const {
  if (at.epoch > total_steps_) {
    throw UsageError(fmt::format(
        "OneCycleLR: step {} of {}; make total_steps the number of steps of the whole training",
        at.epoch, total_steps_));
  }
  const auto& [phase, pct] = phase_at(at.epoch);
  return annealed(phase.start_lr, phase.end_lr, pct, at.group);
}

void OneCycle::set_momenta(std::int64_t epoch) {
  if (!cycle_momentum_) return;
  const auto& [phase, pct] = phase_at(epoch);
  auto& groups = optimizer().param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    *momentum_of(groups[i].options()).value =
        annealed(phase.start_momentum, phase.end_momentum, pct, i);
  }
}

void OneCycle::visit(StateArchive& state) {
  state("total_steps", total_steps_);
  visit_phases(state);
  state("_anneal_func_type", anneal_strategy_);
  state("cycle_momentum", cycle_momentum_);
  if (cycle_momentum_) {
    bool use_beta1 = use_beta1_;
    state("use_beta1", use_beta1);
    if (use_beta1 != use_beta1_)
      state.reject("the state cycles beta1 of one optimizer and the momentum of the other");
  }
  EpochSchedule::visit(state);
  visit_bounds(state);
  if (state.reads()) check_read(state);
}

void OneCycle::visit_phases(StateArchive& state) {
  const auto visit_phase = [](StateArchive& of_phase, CyclePhase& phase) {
    of_phase("end_step", phase.end_step);
    of_phase("start_lr", phase.start_lr);
    of_phase("end_lr", phase.end_lr);
    of_phase("start_momentum", phase.start_momentum);
    of_phase("end_momentum", phase.end_momentum);
  };
  if (state.reads()) {
    const at::IValue list = state.at("_schedule_phases");
    if (!list.isList() || list.toListRef().empty())
      state.reject("'_schedule_phases' has no phases");
    phases_.clear();
    for (const at::IValue& one : list.toListRef()) {
      StateArchive of_phase(name(), one);
      visit_phase(of_phase, phases_.emplace_back());
    }
    return;
  }
  GenericList list = empty_list();
  for (CyclePhase& phase : phases_) {
    StateArchive of_phase(name());
    visit_phase(of_phase, phase);
    list.push_back(of_phase.dict());
  }
  state.insert("_schedule_phases", list);
}

// Python has them in the optimizer's groups, where LibTorch's options have no place for them. Its
// states leave those that this schedule has.
void OneCycle::visit_bounds(StateArchive& state) {
  if (state.reads()) {
    if (!state.has("_bounds")) return;
    StateArchive of_bounds(name(), state.at("_bounds"));
    for (auto& [name, values] : bounds_) visit_rates(of_bounds, name.c_str(), values);
    return;
  }
  StateArchive of_bounds(name());
  for (auto& [name, values] : bounds_) visit_rates(of_bounds, name.c_str(), values);
  state.insert("_bounds", of_bounds.dict());
}

void OneCycle::check_read(const StateArchive& state) const {
  if (total_steps_ < 1) state.reject(fmt::format("'total_steps' is {}", total_steps_));
  if (anneal_strategy_ != "cos" && anneal_strategy_ != "linear") {
    state.reject(fmt::format("'_anneal_func_type' is '{}'", anneal_strategy_));
  }
  if (cycle_momentum_ && !bounds_.contains("max_momentum")) {
    state.reject("it cycles the momentum, and this OneCycleLR was made without cycle_momentum");
  }
  for (const CyclePhase& phase : phases_) {
    for (const std::string& name : {phase.start_lr, phase.end_lr}) {
      if (name == "initial_lr" || name == "max_lr" || name == "min_lr") continue;
      state.reject(fmt::format("a phase begins or ends at '{}'", name));
    }
    for (const std::string& name : {phase.start_momentum, phase.end_momentum}) {
      if (name == "base_momentum" || name == "max_momentum") continue;
      state.reject(fmt::format("a phase begins or ends at '{}'", name));
    }
  }
}

// The least and greatest rates and momenta. Sets the first rates.
OneCycle::Bounds cycle_bounds(const OneCycleLROptions& options, std::vector<double>& initial_lrs) {
  const std::size_t groups = initial_lrs.size();
  OneCycle::Bounds bounds;
  const auto& max_lrs = bounds["max_lr"] = per_group("OneCycleLR: max_lr", options.max_lr, groups);
  auto& min_lrs = bounds["min_lr"];
  for (std::size_t i = 0; i < groups; ++i) {
    initial_lrs[i] = max_lrs[i] / options.div_factor;
    min_lrs.push_back(initial_lrs[i] / options.final_div_factor);
  }
  if (options.cycle_momentum) {
    bounds["max_momentum"] = per_group("OneCycleLR: max_momentum", options.max_momentum, groups);
    bounds["base_momentum"] = per_group("OneCycleLR: base_momentum", options.base_momentum, groups);
  }
  return bounds;
}

}  // namespace

std::unique_ptr<EpochSchedule> make_one_cycle(torch::optim::Optimizer& optimizer,
                                              std::vector<double>& initial_lrs,
                                              const OneCycleLROptions& options) {
  check_cycle(options);
  if (options.cycle_momentum && momentum_of(optimizer.defaults()).value == nullptr) {
    throw UsageError(
        "OneCycleLR: this optimizer has no momentum and no beta1 to cycle; set cycle_momentum = "
        "false");
  }
  std::vector<double> rates = initial_lrs;
  OneCycle::Bounds bounds = cycle_bounds(options, rates);
  auto schedule = std::make_unique<OneCycle>(optimizer, options, rates, std::move(bounds));
  initial_lrs = std::move(rates);
  return schedule;
}

}  // namespace paceline::optim
