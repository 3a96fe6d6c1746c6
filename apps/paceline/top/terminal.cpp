#include "top/terminal.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>

#include "base/errno_error.h"

namespace paceline::top {
namespace {

constexpr const char* kHideCursor = "\x1b[?25l";
constexpr const char* kShowCursor = "\x1b[?25h";
constexpr const char* kClearLine = "\x1b[K";
constexpr const char* kClearBelow = "\x1b[J";

}  // namespace

Terminal::Terminal() : is_terminal_(::isatty(STDOUT_FILENO) == 1) {
  ::sigemptyset(&signals_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH}) {
    ::sigaddset(&signals_, signal);
  }
  ::pthread_sigmask(SIG_BLOCK, &signals_, &before_);
}

Terminal::~Terminal() {
  if (shown_ > 0 && is_terminal_) {
    std::fputs(kShowCursor, stdout);
    std::fflush(stdout);
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Terminal::Size Terminal::size() const {
  winsize size{};
  if (!is_terminal_) return {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) {
    return {80, 24};
  }
  // The last column and row stay empty: some terminals wrap, or scroll, once they are written.
  return {std::max<std::size_t>(size.ws_col, 2) - 1, std::max<std::size_t>(size.ws_row, 2) - 1};
}

void Terminal::show(const std::vector<std::string>& lines) {
  std::string text;
  if (is_terminal_) {
    const std::size_t columns = size().columns;
    // A terminal of another width may have broken the lines: they stay.
    if (shown_ > 0 && columns == columns_) text = fmt::format("\x1b[{}A", shown_);
    text = kHideCursor + text;
    for (const std::string& line : lines) text += line + kClearLine + '\n';
    text += kClearBelow;
    columns_ = columns;
  } else {
    if (shown_ > 0) text = '\n';
    for (const std::string& line : lines) text += line + '\n';
  }
  shown_ = lines.size();
  errno = 0;
  std::fputs(text.c_str(), stdout);
  if (std::fflush(stdout) != 0) {
    throw base::errno_error("cannot write to standard output", errno != 0 ? errno : EIO);
  }
}

int Terminal::wait(std::chrono::nanoseconds time) const {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const timespec length{time.count() / kSecond, time.count() % kSecond};
  const int signal = ::sigtimedwait(&signals_, nullptr, &length);
  return signal > 0 ? signal : 0;
}

}  // namespace paceline::top
