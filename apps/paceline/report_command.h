#pragma once

#include <string>
#include <vector>

namespace paceline::app {

// `paceline report`: the arguments after it; returns the exit code. Throws Error.
int report_command(const std::vector<std::string>& arguments);

}  // namespace paceline::app
