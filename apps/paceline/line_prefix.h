#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "launch/job.h"

namespace paceline::app {

// Replaces $NAME and ${NAME} by their values and $$ by $, as Python's
// string.Template.safe_substitute does: anything else stays.
std::string substitute(std::string_view text, const std::map<std::string, std::string>& values);

// What is before each line of each local rank on the console, from a template; if that is empty,
// from torchrun's variable, or "[rank0]: ".
std::vector<std::string> make_line_prefixes(std::string text, const launch::JobSpec& job);

}  // namespace paceline::app
