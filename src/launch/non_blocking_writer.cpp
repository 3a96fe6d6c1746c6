#include "launch/non_blocking_writer.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <system_error>

#include "base/write_without_blocking.h"

namespace paceline::launch {
namespace {

bool is_writable(int fd, int timeout_ms) {
  pollfd poll{fd, POLLOUT, 0};
  return ::poll(&poll, 1, timeout_ms) > 0;
}

}  // namespace

// A terminal that is writable may have less room than for what is written, and no signal that the
// launcher handles ends that wait.
NonBlockingWriter::NonBlockingWriter(int fd, const char* name)
    : fd_(fd),
      terminal_(::isatty(fd) != 0 ? base::open_non_blocking(fd) : base::UniqueFd()),
      name_(name) {}

std::string NonBlockingWriter::loss() const {
  if (dropped_ == 0) return "";
  return fmt::format("{} bytes of {} were lost: {}", dropped_, name_,
                     std::generic_category().message(dropped_for_));
}

void NonBlockingWriter::write(std::string_view text) {
  text_.append(text);
  write_some();
}

// The descriptor is shared with other processes, so it cannot be made non-blocking. A pipe that is
// writable takes PIPE_BUF bytes without waiting.
void NonBlockingWriter::write_some() {
  while (pending() && is_writable(fd(), 0)) {
    const std::string_view part = text_.rest().substr(0, PIPE_BUF);
    const ssize_t written = ::write(fd(), part.data(), part.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) return;
    if (written < 0) {
      // Lost output must not end the job: the disk is full, the reader of the pipe has ended, or
      // the terminal is gone.
      dropped_ += text_.rest().size();
      dropped_for_ = errno;
      text_.clear();
      return;
    }
    text_.remove_prefix(static_cast<std::size_t>(written));
  }
}

void NonBlockingWriter::finish(std::optional<std::chrono::milliseconds> timeout) {
  const int limit = timeout ? static_cast<int>(timeout->count()) : -1;
  while (pending() && is_writable(fd(), limit)) write_some();
}

}  // namespace paceline::launch
