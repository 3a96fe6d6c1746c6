#pragma once

#include <string_view>

namespace paceline::base {

// Writes a text to a descriptor: a file, or as much as a pipe, a terminal or a socket takes at
// once. The rest is dropped. Raises no SIGPIPE; errors are ignored.
void write_without_blocking(int fd, std::string_view text);

}  // namespace paceline::base
