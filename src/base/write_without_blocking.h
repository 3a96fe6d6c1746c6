#pragma once

#include <string_view>

#include "base/unique_fd.h"

namespace paceline::base {

// The same pipe or terminal, opened anew for writing that does not wait: O_NONBLOCK of a descriptor
// itself is shared with other processes. Empty, with errno, if that fails, as without /proc. Not
// for files, which share their offset with other processes.
UniqueFd open_non_blocking(int fd);

// Writes a text to a descriptor: a file, or as much as a pipe, a terminal or a socket takes at
// once. The rest is dropped. Raises no SIGPIPE; errors are ignored.
void write_without_blocking(int fd, std::string_view text);

}  // namespace paceline::base
