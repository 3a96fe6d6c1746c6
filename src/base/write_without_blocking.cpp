#include "base/write_without_blocking.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <ctime>

#include "base/signals_blocked.h"

namespace paceline::base {
namespace {

ssize_t write_without_signal(int fd, std::string_view text) {
  const SignalsBlocked blocked;
  sigset_t pending;
  ::sigpending(&pending);
  const ssize_t size = ::write(fd, text.data(), text.size());
  if (size < 0 && errno == EPIPE && ::sigismember(&pending, SIGPIPE) == 0) {
    sigset_t only_pipe;
    ::sigemptyset(&only_pipe);
    ::sigaddset(&only_pipe, SIGPIPE);
    const timespec now{};
    ::sigtimedwait(&only_pipe, nullptr, &now);
    errno = EPIPE;
  }
  return size;
}

}  // namespace

UniqueFd open_non_blocking(int fd) {
  return UniqueFd(::open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                         O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

void write_without_blocking(int fd, std::string_view text) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return;
  UniqueFd own;
  if (S_ISFIFO(info.st_mode) || ::isatty(fd) == 1) {
    own = open_non_blocking(fd);
    if (!own && errno == ENXIO) return;  // nobody has the pipe's other end
  }
  pollfd stream{own ? own.get() : fd, POLLOUT, 0};
  while (!text.empty() && ::poll(&stream, 1, 0) > 0) {
    const std::string_view part = text.substr(0, PIPE_BUF);
    const ssize_t size = S_ISSOCK(info.st_mode) ? ::send(stream.fd, part.data(), part.size(),
                                                         MSG_DONTWAIT | MSG_NOSIGNAL)
                                                : write_without_signal(stream.fd, part);
    if (size < 0 && errno != EINTR) return;
    text.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
  }
}

}  // namespace paceline::base
