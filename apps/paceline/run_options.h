#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/job.h"

namespace paceline::app {

// Translates the arguments after `paceline run`. Empty if they ask for help; `help` is its text
// then. Throws UsageError.
std::optional<launch::JobSpec> parse_run_options(const std::vector<std::string>& arguments,
                                                 int cores, std::string& help);

}  // namespace paceline::app
