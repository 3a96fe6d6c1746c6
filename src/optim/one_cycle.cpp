#include <fmt/format.h>
#include <torch/optim.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <tuple>
#include <utility>

#include <paceline/error.h>
#include <paceline/optimizers.h>

#include "optim/one_cycle_options.h"
#include "optim/schedule.h"

namespace paceline::optim {
namespace {

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
  OneCycle(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options,
           std::vector<double> initial_lrs, CycleBounds bounds)
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
  CycleBounds bounds_;
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
        "OneCycleLR: step {} of {}; make total_steps, {} in the options or in the state that was "
        "loaded, the number of steps of the whole training",
        at.epoch, total_steps_, total_steps_));
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

// Python has them in the optimizer's groups, where LibTorch's options have no place for them. So a
// state from Python changes none of them.
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

}  // namespace

std::unique_ptr<EpochSchedule> make_one_cycle(torch::optim::Optimizer& optimizer,
                                              std::vector<double>& initial_lrs,
                                              const OneCycleLROptions& options) {
  const auto has_none = [](torch::optim::OptimizerParamGroup& group) {
    return momentum_of(group.options()).value == nullptr;
  };
  if (options.cycle_momentum && std::ranges::any_of(optimizer.param_groups(), has_none)) {
    throw UsageError(
        "OneCycleLR: this optimizer has no momentum and no beta1 to cycle; set cycle_momentum = "
        "false");
  }
  std::vector<double> rates = initial_lrs;
  CycleBounds bounds = cycle_bounds(options, rates);
  auto schedule = std::make_unique<OneCycle>(optimizer, options, rates, std::move(bounds));
  initial_lrs = std::move(rates);
  return schedule;
}

}  // namespace paceline::optim
