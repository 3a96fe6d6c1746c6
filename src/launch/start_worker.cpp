#include "launch/start_worker.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "base/cores.h"
#include "base/process_stat.h"
#include "base/unique_fd.h"

namespace paceline::launch {
namespace {

constexpr int kWatchInterval = 10;  // milliseconds

std::vector<char*> c_strings(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (const std::string& string : strings) pointers.push_back(const_cast<char*>(string.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

bool arrange_descriptors(const Worker& worker) {
  for (int number = 0; number < 3; ++number) {
    const int fd = worker.standard[static_cast<std::size_t>(number)];
    // dup2 onto itself would leave it closed on exec.
    if ((fd == number ? ::fcntl(fd, F_SETFD, 0) : ::dup2(fd, number)) < 0) return false;
  }
  // Also descriptors that this process inherited by accident. A kernel before 5.11 cannot do this
  // and leaves them open; ours are closed on exec anyway.
  ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (const int fd : worker.inherited) {
    if (::fcntl(fd, F_SETFD, 0) != 0) return false;
  }
  return true;
}

// Where a sandbox refuses it, the worker is merely slower.
void set_affinity(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  base::CpuSet set{};
  for (const int cpu : cpus) CPU_SET_S(cpu, sizeof(set), set.data());
  ::sched_setaffinity(0, sizeof(set), set.data());
}

// A handler would run here, in a copy of the parent, between unblocking its signal and exec.
void reset_handlers() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action.sa_handler = SIG_DFL;
    action.sa_flags = 0;
    ::sigaction(signal, &action, nullptr);
  }
}

// In the new process: becomes the program once told to, or returns with errno set. Makes system
// calls only and allocates nothing: another thread of the parent may have held any lock at the
// fork.
void execute(const Worker& worker, const std::vector<char*>& arguments,
             const std::vector<char*>& environment, const sigset_t& mask, pid_t parent, int go) {
  // In the session of a terminal, opening /dev/tty would stop the worker: it is in the background.
  if (worker.own_session && ::setsid() < 0) return;
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  if (::getppid() != parent) ::_exit(127);  // it ended before the line above
  char byte = 0;
  if (::read(go, &byte, sizeof(byte)) != sizeof(byte)) ::_exit(127);
  if (!arrange_descriptors(worker)) return;
  set_affinity(worker.cpus);
  reset_handlers();
  ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  ::execve(worker.file.c_str(), arguments.data(), environment.data());
}

// Whether the new process executes its program, or has ended.
bool has_begun(pid_t child) {
  constexpr unsigned kForkedWithoutExec = 0x40;  // the kernel's PF_FORKNOEXEC, which ps shows as F
  const auto process = base::stat_of(child);
  if (!process) return ::kill(child, 0) != 0;
  return process->state == 'Z' || (process->flags & kForkedWithoutExec) == 0;
}

}  // namespace

int start_worker(const Worker& worker, const sigset_t& mask,
                 const std::function<void(pid_t)>& created) {
  const std::vector<char*> arguments = c_strings(worker.arguments);
  const std::vector<char*> environment = c_strings(worker.environment);
  // Carries a byte that lets the new process go on, and an errno back from it; a successful exec
  // closes its end.
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return errno;
  const base::UniqueFd near_end(ends[0]);
  base::UniqueFd far_end(ends[1]);

  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return errno;
  if (pid == 0) {
    execute(worker, arguments, environment, mask, parent, far_end.get());
    const int error = errno;
    ::send(far_end.get(), &error, sizeof(error), MSG_NOSIGNAL);
    ::_exit(127);
  }
  far_end.reset();
  created(pid);
  ::send(near_end.get(), "", 1, MSG_NOSIGNAL);
  // A successful exec hangs up, but not while a process that another thread has forked meanwhile
  // has a copy of the far end. So the new process is watched, too.
  pollfd answer{near_end.get(), POLLIN, 0};
  while (::poll(&answer, 1, kWatchInterval) <= 0 && !has_begun(pid)) {
  }
  int error = 0;
  if (::recv(near_end.get(), &error, sizeof(error), MSG_DONTWAIT) <= 0) return 0;
  ::waitpid(pid, nullptr, 0);
  return error;
}

}  // namespace paceline::launch
