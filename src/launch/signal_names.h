#pragma once

#include <string>
#include <string_view>

namespace paceline::launch {

// "SIGKILL"; "signal 40" for one without a name.
std::string signal_name(int signal);

// What it usually means when a worker dies of it, as it fits into parentheses; empty for signals
// that say nothing.
std::string_view signal_meaning(int signal);

}  // namespace paceline::launch
