#include "support/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <stdexcept>

namespace paceline::test {
namespace {

using base::UniqueFd;
bool read_into(UniqueFd& fd, std::string& text) {
  std::array<char, 4096> buffer;
  const ssize_t size = ::read(fd.get(), buffer.data(), buffer.size());
  if (size > 0) text.append(buffer.data(), static_cast<std::size_t>(size));
  if (size <= 0) fd.reset();
  return size > 0;
}

}  // namespace

char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(')');
  return name_end == std::string::npos ? '\0' : stat.at(name_end + 2);
}

std::optional<base::Pipe> open_terminal(unsigned short columns) {
  int master = -1;
  int slave = -1;
  const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  if (::openpty(&master, &slave, nullptr, nullptr, &size) != 0) return std::nullopt;
  for (const int fd : {master, slave}) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return base::Pipe{UniqueFd(master), UniqueFd(slave)};
}

ChildProcess::ChildProcess(std::vector<std::string> command,
                           const std::vector<std::pair<std::string, std::string>>& environment,
                           base::Pipe out, bool err_too) {
  base::Pipe err = base::make_pipe();
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    ::setsid();
    // A shell's background jobs ignore these, and their children inherit that.
    for (const int number : {SIGHUP, SIGINT, SIGQUIT}) ::signal(number, SIG_DFL);
    ::dup2(out.write_end.get(), STDOUT_FILENO);
    ::dup2(err_too ? out.write_end.get() : err.write_end.get(), STDERR_FILENO);
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  out_fd_ = std::move(out.read_end);
  err_fd_ = std::move(err.read_end);
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void ChildProcess::signal(int number) const {
  ::kill(pid_, number);
}

bool ChildProcess::read_some() {
  std::array<pollfd, 2> fds{{{out_fd_.get(), POLLIN, 0}, {err_fd_.get(), POLLIN, 0}}};
  const auto deadline = std::chrono::milliseconds(kTestTimeout).count();
  if (::poll(fds.data(), fds.size(), static_cast<int>(deadline)) == 0) {
    throw std::runtime_error("timed out waiting for output; so far:\n" + out_ + err_);
  }
  if (fds[0].revents != 0) read_into(out_fd_, out_);
  if (fds[1].revents != 0) read_into(err_fd_, err_);
  return out_fd_ || err_fd_;
}

void ChildProcess::wait_for(const std::string& text) {
  while ((out_ + err_).find(text) == std::string::npos) {
    if (!read_some()) throw std::runtime_error("ended without '" + text + "':\n" + out_ + err_);
  }
}

int ChildProcess::wait() {
  while (out_fd_ || err_fd_) read_some();
  int status = 0;
  if (!eventually([&] { return ::waitpid(pid_, &status, WNOHANG) != 0; })) {
    throw std::runtime_error("timed out waiting for the end:\n" + out_ + err_);
  }
  pid_ = -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::vector<int> numbers_after(const std::string& text, const std::string& label) {
  std::vector<int> numbers;
  const std::string pattern = label + "=";
  for (auto at = text.find(pattern); at != text.npos; at = text.find(pattern, at + 1)) {
    int number = 0;
    const char* const digits = text.data() + at + pattern.size();
    const auto [end, error] = std::from_chars(digits, text.data() + text.size(), number);
    if (error == std::errc() && number >= 0) numbers.push_back(number);
  }
  return numbers;
}

std::vector<pid_t> pids_after(const std::string& text, const std::string& label) {
  auto pids = numbers_after(text, label);
  std::erase(pids, 0);
  return pids;
}

pid_t pid_after(const std::string& text, const std::string& label) {
  const auto pids = pids_after(text, label);
  return pids.size() == 1 ? pids.front() : throw std::runtime_error(label + " in " + text);
}

}  // namespace paceline::test
