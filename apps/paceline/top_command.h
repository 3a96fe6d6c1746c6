#pragma once

#include <string>
#include <vector>

namespace paceline::app {

// `paceline top`: the arguments after it; returns the exit code. Throws Error.
int top_command(const std::vector<std::string>& arguments);

}  // namespace paceline::app
