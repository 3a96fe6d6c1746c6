#pragma once

#include <map>
#include <string>

namespace paceline::base {

// What tune_malloc does, as environment variables of a process that is to be started. Empty if this
// process has variables that say something else about malloc.
std::map<std::string, std::string> malloc_variables();

}  // namespace paceline::base
