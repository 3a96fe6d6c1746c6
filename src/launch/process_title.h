#pragma once

#include <string>

namespace paceline::launch {

// Sets the name and the command line of this process, as ps, killall and pkill -f see them. The
// name is cut to 15 bytes, the command line to the length of the old one. Overwrites the strings
// that main's argv points to.
void set_process_title(const std::string& title);

}  // namespace paceline::launch
