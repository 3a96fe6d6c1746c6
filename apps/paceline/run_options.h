#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/job.h"

namespace paceline::app {

struct RunOptions {
  launch::JobSpec job;
  bool bind_to_cores = false;
  bool deterministic = false;  // job.environment has what it sets
};

// Translates the arguments after `paceline run`. Empty if they ask for help; `help` is its text
// then. Throws UsageError.
std::optional<RunOptions> parse_run_options(const std::vector<std::string>& arguments, int cores,
                                            std::string& help);

}  // namespace paceline::app
