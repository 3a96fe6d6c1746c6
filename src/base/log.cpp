#include "base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <mutex>
#include <string>
#include <utility>

#include "base/unique_fd.h"

namespace paceline {
namespace {

struct Sink {
  std::mutex mutex;
  LogCallback callback;
};

// Never destroyed: a thread that outlives main may still log.
Sink& sink() {
  static Sink* const instance = new Sink;
  return *instance;
}

}  // namespace

void set_log_callback(LogCallback callback) {
  std::lock_guard lock(sink().mutex);
  sink().callback = std::move(callback);
}

namespace base {

bool has_log_callback() {
  std::lock_guard lock(sink().mutex);
  return static_cast<bool>(sink().callback);
}

void log_message(LogLevel level, std::string_view message) {
  std::lock_guard lock(sink().mutex);
  if (sink().callback) sink().callback(level, message);
}

std::string_view name_of(LogLevel level) {
  constexpr std::array<std::string_view, 4> kNames{"debug", "info", "warning", "error"};
  return kNames[std::min(static_cast<std::size_t>(level), kNames.size() - 1)];
}

void write_what_is_taken(int fd, std::string_view message) {
  // The same pipe, opened anew to be non-blocking: O_NONBLOCK of a descriptor itself is shared with
  // other processes. Other files share their offset, too.
  struct stat info {};
  UniqueFd own;
  if (::fstat(fd, &info) == 0 && S_ISFIFO(info.st_mode)) {
    own = UniqueFd(
        ::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
  }
  pollfd stream{own ? own.get() : fd, POLLOUT, 0};
  while (!message.empty() && ::poll(&stream, 1, 0) > 0) {
    const ssize_t size =
        ::write(stream.fd, message.data(), std::min<std::size_t>(message.size(), PIPE_BUF));
    if (size < 0 && errno != EINTR) return;
    message.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  }
}

}  // namespace base
}  // namespace paceline
