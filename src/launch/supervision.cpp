#include "launch/supervision.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <new>

#include "base/errno_error.h"
#include "base/open_pidfd.h"
#include "launch/process_tree.h"
#include "launch/program.h"

namespace paceline::launch {
namespace {

// With a shell's exit code if the program itself cannot be executed.
[[noreturn]] void throw_start_failure(const std::string& program, int code) {
  std::string message = base::errno_error(fmt::format("cannot start {}", program), code).what();
  if (code == ENOENT) message += "; the interpreter that its first line names may be missing";
  if (code == ENOEXEC) message += "; a script needs a first line such as #!/bin/sh";
  if (code == ENOENT) throw ProgramError(message, 127);
  if (code == ENOEXEC || code == EACCES || code == ETXTBSY || code == ELIBBAD) {
    throw ProgramError(message, 126);
  }
  throw Error(message);
}

}  // namespace

Supervision::SharedMemory::SharedMemory(std::size_t workers)
    : size_(sizeof(SharedState) + workers * sizeof(WorkerState)),
      address_(::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
  if (address_ == MAP_FAILED) throw base::errno_error("cannot map memory for the supervisor");
  auto* const states =
      reinterpret_cast<WorkerState*>(static_cast<char*>(address_) + sizeof(SharedState));
  new (address_) SharedState{0, 0, 0, {states, workers}};
}

Supervision::SharedMemory::~SharedMemory() {
  ::munmap(address_, size_);
}

Supervision::Supervision(const Plan& plan)
    : memory_(plan.workers.size()), program_(plan.workers.front().file) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw base::errno_error("cannot create the supervisor's socket");
  }
  control_ = base::UniqueFd(ends[0]);
  const base::UniqueFd far_end(ends[1]);
  // If a sandbox refuses it, the socket's hang-up is enough.
  const base::UniqueFd self = base::open_pidfd(::getpid());

  // If the guard and the supervisor are both killed, this process adopts what they leave behind.
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) throw base::errno_error("cannot adopt processes");

  // If SIGCHLD is ignored, which a parent may leave so, the kernel reaps children at once and may
  // reuse their pids.
  struct sigaction child {};
  ::sigaction(SIGCHLD, nullptr, &child);
  if (child.sa_handler == SIG_IGN) ::signal(SIGCHLD, SIG_DFL);

  // Blocked before the fork: no signal may reach a supervisor that is not ready.
  sigset_t all;
  sigset_t mask;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &mask);
  pid_ = ::fork();
  // Other threads' locks may be held here for ever, except malloc's, which glibc releases.
  if (pid_ == 0) guard(plan, memory_.state(), far_end.get(), self.get());
  const int code = errno;
  ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  if (pid_ < 0) throw base::errno_error("cannot start the supervisor", code);
}

// Shut down, not just closed: a process forked meanwhile may have a copy.
Supervision::~Supervision() {
  send(SIGKILL);
  ::shutdown(control_.get(), SHUT_WR);
  ::kill(pid_, SIGCONT);  // a suspended guard would not end
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) kill_descendants();  // the guard was killed
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

// A suspended supervisor would not read the command. The pid is still the supervisor's: the guard
// reaps it only after this process has hung up, and if the guard was killed, this process reaps it
// after its last command.
void Supervision::send_command(const std::vector<int>& command) {
  ::send(control_.get(), command.data(), command.size() * sizeof(int), MSG_NOSIGNAL);
  if (const pid_t supervisor = memory_.state().supervisor) ::kill(supervisor, SIGCONT);
}

void Supervision::send_failure(const std::set<int>& blamed_workers) {
  std::vector<int> command{0};
  command.insert(command.end(), blamed_workers.begin(), blamed_workers.end());
  send_command(command);
}

void Supervision::reap_foreign_children() {
  siginfo_t end{};
  while (::waitid(P_ALL, 0, &end, WEXITED | WNOHANG | WNOWAIT) == 0 && end.si_pid != 0) {
    // Their numbers have to stay theirs for the signals to them.
    if (end.si_pid == pid_ || end.si_pid == memory_.state().supervisor) return;
    ::waitpid(end.si_pid, nullptr, 0);
    end.si_pid = 0;
  }
}

Supervision::Event Supervision::next_event() {
  Loss notice{};
  const ssize_t size = ::recv(control_.get(), &notice, sizeof(notice), MSG_DONTWAIT);
  if (size == sizeof(notice)) {
    loss_ = notice;
    return Event::lost;
  }
  if (size > 0) return Event::failed;
  return size < 0 && (errno == EAGAIN || errno == EINTR) ? Event::none : Event::ended;
}

std::span<const WorkerState> Supervision::result() {
  const SharedState& state = memory_.state();
  if (state.start_error != 0) throw_start_failure(program_, state.start_error);
  for (const WorkerState& worker : state.workers) {
    if (worker.ended) continue;
    throw Error("the job's supervisor process was killed, and the workers with it");
  }
  return state.workers;
}

}  // namespace paceline::launch
