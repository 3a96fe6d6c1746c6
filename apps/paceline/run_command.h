#pragma once

#include <string>
#include <vector>

namespace paceline::app {

// `paceline run`: the arguments after it; returns the exit code. Throws Error.
int run_command(const std::vector<std::string>& arguments);

}  // namespace paceline::app
