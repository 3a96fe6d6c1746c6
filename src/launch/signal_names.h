#pragma once

#include <string>
#include <string_view>

namespace paceline::launch {

// "SIGKILL"; "signal 40" for one without a name.
std::string signal_name(int signal);

// The usual cause if a worker dies of it, to put in parentheses; empty if there is none.
std::string_view signal_meaning(int signal);

}  // namespace paceline::launch
