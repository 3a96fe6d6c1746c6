#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace paceline::launch {

// "SIGKILL"; "signal 40" for one without a name.
std::string signal_name(int signal);

// The signals of a list such as "SIGTERM,SIGUSR1": of those that a launcher passes on. Throws
// UsageError about `source`, where the list is from.
std::vector<int> parse_signals(const std::string& list, std::string_view source);

// The usual cause if a worker dies of it, to put in parentheses; empty if there is none.
std::string_view signal_meaning(int signal);

}  // namespace paceline::launch
