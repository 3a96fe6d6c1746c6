#pragma once

#include <string>

namespace paceline::app {

// Becomes the program paceline-NAME, which is beside this one or in ../libexec/paceline. Returns
// only by throwing UsageError, if it is in neither place, or Error.
[[noreturn]] void become_other_command(const std::string& name, char** arguments);

}  // namespace paceline::app
