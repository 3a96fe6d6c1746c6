#pragma once

#include <map>
#include <string>

namespace paceline::base {

// What tune_malloc does, as environment variables for a new process. Empty if this process's own
// variables configure malloc.
std::map<std::string, std::string> malloc_variables();

}  // namespace paceline::base
