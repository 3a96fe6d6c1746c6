#include "measure/external_peer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

#include <paceline/distributed.h>

#include "base/errno_error.h"
#include "base/pipe.h"

namespace paceline::bench {
namespace {

// Which descriptors become which.
using Descriptors = std::vector<std::pair<int, int>>;

// The process, or -1 with errno set.
pid_t start(const std::vector<std::string>& command, const Descriptors& descriptors) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  for (const auto& [from, to] : descriptors) {
    ::posix_spawn_file_actions_adddup2(&actions, from, to);
  }
  pid_t pid = -1;
  errno = ::posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), ::environ);
  ::posix_spawn_file_actions_destroy(&actions);
  return errno == 0 ? pid : -1;
}

// write(), but a reader that has ended is EPIPE, not a SIGPIPE.
ssize_t write_without_signal(int fd, const std::string& text) {
  sigset_t pipe;
  sigset_t mask;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, &mask);
  const ssize_t written = ::write(fd, text.data(), text.size());
  const int code = errno;
  constexpr timespec kNow{};
  if (written < 0 && code == EPIPE) ::sigtimedwait(&pipe, nullptr, &kNow);
  ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  errno = code;
  return written;
}

int wait_for(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

}  // namespace

Contender external_contender(std::string implementation, int calls,
                             const std::function<std::vector<std::string>()>& command) {
  Contender contender{std::move(implementation), "", {}, {}, calls};
  const auto peer = get_rank() == 0 ? std::make_shared<ExternalPeer>(command()) : nullptr;
  contender.elsewhere = [peer](int count) { return peer ? peer->measure(count) : Sample(); };
  return contender;
}

std::string beside_this_program(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").replace_filename(name);
}

bool can_import(const std::string& python, const std::string& module) {
  const base::UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const pid_t pid =
      start({python, "-c", "import " + module},
            {{null.get(), STDIN_FILENO}, {null.get(), STDOUT_FILENO}, {null.get(), STDERR_FILENO}});
  return pid > 0 && wait_for(pid) == 0;
}

ExternalPeer::ExternalPeer(const std::vector<std::string>& command) : name_(command.front()) {
  base::Pipe to = base::make_pipe();
  base::Pipe from = base::make_pipe();
  pid_ = start(command, {{to.read_end.get(), STDIN_FILENO}, {from.write_end.get(), STDOUT_FILENO}});
  if (pid_ < 0) throw base::errno_error("cannot start " + name_);
  input_ = std::move(to.write_end);
  output_ = std::move(from.read_end);
}

ExternalPeer::~ExternalPeer() {
  input_.reset();
  wait_for(pid_);
}

Sample ExternalPeer::measure(int calls) {
  if (write_without_signal(input_.get(), fmt::format("{}\n", calls)) < 0) {
    throw base::errno_error("cannot write to " + name_);
  }
  const std::string answer = read_line();
  Sample sample;
  if (std::sscanf(answer.c_str(), "%lf %lf", &sample.wall_us, &sample.cpu_us) == 2) return sample;
  throw Error(fmt::format("{} answered '{}'; expected two times", name_, answer));
}

std::string ExternalPeer::read_line() {
  std::array<char, 256> buffer;
  std::size_t end = 0;
  while ((end = pending_.find('\n')) == std::string::npos) {
    const ssize_t size = ::read(output_.get(), buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) throw Error(name_ + " ended before its measurement");
    pending_.append(buffer.data(), static_cast<std::size_t>(size));
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end + 1);
  return line;
}

}  // namespace paceline::bench
