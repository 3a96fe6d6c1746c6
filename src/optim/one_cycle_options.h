#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <paceline/lr_scheduler.h>

namespace paceline::optim {

// A phase lasts from the end of the previous one to end_step. Its values are named as in Python.
struct CyclePhase {
  double end_step = 0;
  std::string start_lr;
  std::string end_lr;
  std::string start_momentum;
  std::string end_momentum;
};

// The numbers of OneCycleLROptions. They throw UsageError for options out of range.
std::int64_t total_steps_of(const OneCycleLROptions& options);
std::vector<CyclePhase> cycle_phases(const OneCycleLROptions& options, std::int64_t total_steps);

// The values of each group by their names. Sets the first rates.
using CycleBounds = std::map<std::string, std::vector<double>, std::less<>>;
CycleBounds cycle_bounds(const OneCycleLROptions& options, std::vector<double>& initial_lrs);

}  // namespace paceline::optim
