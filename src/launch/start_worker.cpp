#include "launch/start_worker.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "base/unique_fd.h"

namespace paceline::launch {
namespace {

std::vector<char*> c_strings(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (const std::string& string : strings) pointers.push_back(const_cast<char*>(string.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

bool arrange_descriptors(const Worker& worker) {
  for (int number = 0; number < 3; ++number) {
    if (::dup2(worker.standard[static_cast<std::size_t>(number)], number) < 0) return false;
  }
  // Also what this process itself inherited by somebody's oversight. A kernel that cannot do this
  // (before 5.11) leaves such descriptors open; ours are closed on exec anyway.
  ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (const int fd : worker.inherited) {
    if (::fcntl(fd, F_SETFD, 0) != 0) return false;
  }
  return true;
}

// In the new process: becomes the program, or returns with errno set.
void execute(const Worker& worker, const std::vector<char*>& arguments,
             const std::vector<char*>& environment, const sigset_t& mask, pid_t parent) {
  if (::setpgid(0, 0) != 0 || ::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(1);  // it ended before the line above
  if (!arrange_descriptors(worker)) return;
  ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  ::execve(worker.file.c_str(), arguments.data(), environment.data());
}

}  // namespace

Started start_worker(const Worker& worker, const sigset_t& mask) {
  const std::vector<char*> arguments = c_strings(worker.arguments);
  const std::vector<char*> environment = c_strings(worker.environment);
  // Closed by a successful exec; carries errno otherwise.
  std::array<int, 2> report{};
  if (::pipe2(report.data(), O_CLOEXEC) != 0) return {.error = errno};
  const base::UniqueFd read_end(report[0]);
  base::UniqueFd write_end(report[1]);

  const pid_t parent = ::getpid();
  Started started{.pid = ::fork()};
  if (started.pid < 0) return {.error = errno};
  if (started.pid == 0) {
    execute(worker, arguments, environment, mask, parent);
    const int error = errno;
    [[maybe_unused]] const ssize_t ignored = ::write(write_end.get(), &error, sizeof(error));
    ::_exit(127);
  }
  write_end.reset();
  ssize_t size = 0;
  do {
    size = ::read(read_end.get(), &started.error, sizeof(started.error));
  } while (size < 0 && errno == EINTR);
  if (started.error != 0) ::waitpid(started.pid, nullptr, 0);
  return started;
}

}  // namespace paceline::launch
