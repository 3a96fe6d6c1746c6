#include "measure/external_peer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "base/pipe.h"
#include "launch/report.h"

namespace paceline::bench {
namespace {

constexpr std::chrono::milliseconds kEndTimeout{10'000};
constexpr std::chrono::milliseconds kStopTimeout{2'000};  // from SIGTERM to SIGKILL
constexpr const char* kEnded = "ended before its measurement";

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

// How the process ended; nothing if it still runs when the time is over.
std::optional<int> wait_for(pid_t pid, std::chrono::milliseconds timeout) {
  const auto deadline = base::Deadline::after(timeout);
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) != pid) {
    if (deadline.expired()) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return status;
}

// Kills a process that does not obey; mpiexec passes SIGTERM on to the ranks.
void stop(pid_t pid) {
  ::kill(pid, SIGTERM);
  if (wait_for(pid, kStopTimeout)) return;
  ::kill(pid, SIGKILL);
  wait_for(pid, base::Deadline::kLongest);
}

}  // namespace

std::string beside_this_program(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").replace_filename(name);
}

bool can_import(const std::string& python, const std::string& module) {
  const base::UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const pid_t pid =
      start({python, "-c", "import " + module},
            {{null.get(), STDIN_FILENO}, {null.get(), STDOUT_FILENO}, {null.get(), STDERR_FILENO}});
  return pid > 0 && wait_for(pid, base::Deadline::kLongest) == 0;
}

ExternalPeer::ExternalPeer(PeerProgram program, std::chrono::milliseconds timeout)
    : program_(std::move(program)), timeout_(timeout) {
  base::Pipe to = base::make_pipe();
  base::Pipe from = base::make_pipe();
  pid_ = start(program_.command,
               {{to.read_end.get(), STDIN_FILENO}, {from.write_end.get(), STDOUT_FILENO}});
  if (pid_ < 0) {
    throw base::errno_error(
        fmt::format("{}: cannot start {}", program_.name, program_.command.front()));
  }
  input_ = std::move(to.write_end);
  output_ = std::move(from.read_end);
}

ExternalPeer::~ExternalPeer() {
  if (pid_ < 0) return;
  // Not by the end of its input: OpenMPI's mpiexec does not always pass that on, and Intel's
  // complains if the ranks end first.
  write_without_signal(input_.get(), "0\n");
  if (!wait_for(pid_, std::min(timeout_, kEndTimeout))) stop(pid_);
}

void ExternalPeer::fail(const std::string& what) {
  std::string end;
  if (pid_ > 0) {
    input_.reset();
    const auto status = wait_for(pid_, std::min(timeout_, kEndTimeout));
    end = status ? ": " + launch::describe_end(*status) : "";
    if (!status) stop(pid_);
    pid_ = -1;
  }
  throw Error(fmt::format("{} {}{}; {}", program_.name, what, end, program_.remedy));
}

Sample ExternalPeer::measure(int calls) {
  const auto deadline = base::Deadline::after(timeout_);
  if (pid_ < 0 || write_without_signal(input_.get(), fmt::format("{}\n", calls)) < 0) {
    fail(kEnded);
  }
  const std::string answer = read_line(deadline);
  Sample sample;
  if (std::istringstream(answer) >> sample.wall_us >> sample.cpu_us) return sample;
  fail(fmt::format("answered '{}' where two times were expected", answer));
}

std::string ExternalPeer::read_line(const base::Deadline& deadline) {
  std::array<char, 256> buffer;
  std::size_t end = 0;
  while ((end = pending_.find('\n')) == std::string::npos) {
    pollfd readable{output_.get(), POLLIN, 0};
    const int ready = ::poll(&readable, 1, static_cast<int>(deadline.remaining().count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      fail(fmt::format("did not answer within {:g} s",
                       std::chrono::duration<double>(deadline.budget()).count()));
    }
    const ssize_t size = ::read(output_.get(), buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) fail(kEnded);
    pending_.append(buffer.data(), static_cast<std::size_t>(size));
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end + 1);
  return line;
}

}  // namespace paceline::bench
