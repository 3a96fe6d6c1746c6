#include "optim/one_cycle_options.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include <paceline/error.h>

#include "optim/schedule.h"

namespace paceline::optim {
namespace {

void check_positive(const char* name, std::int64_t value) {
  if (value > 0) return;
  throw UsageError(fmt::format("OneCycleLR: {} is {}; it must be at least 1", name, value));
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
    if (std::isfinite(value)) continue;
    throw UsageError(fmt::format("{} has {}; it must be finite", name, value));
  }
  values.resize(groups, values[0]);
  return values;
}

}  // namespace

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
  std::int64_t steps = 0;
  if (__builtin_mul_overflow(*options.epochs, *options.steps_per_epoch, &steps)) {
    throw UsageError(fmt::format("OneCycleLR: {} epochs of {} steps are too many", *options.epochs,
                                 *options.steps_per_epoch));
  }
  return steps;
}

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

CycleBounds cycle_bounds(const OneCycleLROptions& options, std::vector<double>& initial_lrs) {
  check_cycle(options);
  const std::size_t groups = initial_lrs.size();
  CycleBounds bounds;
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

}  // namespace paceline::optim
