#include "launch/non_blocking_writer.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "base/errno_error.h"

namespace paceline::launch {
namespace {

bool is_writable(int fd, int timeout_ms) {
  pollfd poll{fd, POLLOUT, 0};
  return ::poll(&poll, 1, timeout_ms) > 0;
}

}  // namespace

void NonBlockingWriter::write(std::string_view text) {
  text_ += text;
  write_some();
}

// The descriptor is shared with other processes, so it cannot be made non-blocking. A pipe that is
// writable takes PIPE_BUF bytes without waiting.
void NonBlockingWriter::write_some() {
  while (pending() && is_writable(fd_, 0)) {
    const ssize_t written =
        ::write(fd_, text_.data(), std::min<std::size_t>(text_.size(), PIPE_BUF));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return;
    if (written < 0) throw base::errno_error(fmt::format("cannot write to {}", name_));
    text_.erase(0, static_cast<std::size_t>(written));
  }
}

void NonBlockingWriter::finish(std::optional<std::chrono::milliseconds> timeout) {
  const int limit = timeout ? static_cast<int>(timeout->count()) : -1;
  while (pending() && is_writable(fd_, limit)) write_some();
}

}  // namespace paceline::launch
