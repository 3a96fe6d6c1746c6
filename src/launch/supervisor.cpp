#include "launch/supervisor.h"

#include <linux/close_range.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/parse.h"
#include "base/unique_fd.h"
#include "launch/process_title.h"
#include "launch/process_tree.h"

namespace paceline::launch {
namespace {

using base::UniqueFd;

// For how long something may be left that /proc does not show.
constexpr std::chrono::seconds kHidden{5};

// An old kernel or a sandbox may refuse the call.
void close_from_to(unsigned first, unsigned last) {
  if (::close_range(first, last, 0) == 0) return;
  std::vector<unsigned> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    if (const auto fd = base::parse_number(entry->path().filename().string(), first, last)) {
      found.push_back(*fd);
    }
  }
  for (const unsigned fd : found) ::close(static_cast<int>(fd));
}

// Above all, this closes the other ends of the sockets and pipes: their hang-up reports a worker's
// end.
void close_all_but(std::vector<int> keep) {
  std::sort(keep.begin(), keep.end());
  unsigned first = 0;
  for (const int fd : keep) {
    if (fd < 0) continue;
    const auto kept = static_cast<unsigned>(fd);
    if (kept > first) close_from_to(first, kept - 1);
    first = kept + 1;
  }
  close_from_to(first, ~0U);
}

class Supervisor {
 public:
  Supervisor(const Plan& plan, SharedState& state, int control, int launcher);

  void run();

 private:
  void close_foreign_descriptors() const;
  bool anything_left() const;
  bool may_end_nothing();
  void leave_workers();
  bool has_news() const;
  void send_news();
  void send_all_news();
  void wait_for_event();
  void receive_command();
  void collect_ends();
  void check_deadline();
  void signal_all(int signal);
  bool in_live_group(const Process& process) const;

  SharedState& state_;
  const int control_;
  const int launcher_;
  UniqueFd children_;  // readable after a child has ended
  WorkerSet workers_;
  std::size_t losses_sent_ = 0;
  bool failure_sent_ = false;
  std::optional<base::Deadline> hidden_;  // set while something is left that cannot be seen
};

Supervisor::Supervisor(const Plan& plan, SharedState& state, int control, int launcher)
    : state_(state),
      control_(control),
      launcher_(launcher),
      workers_(plan, state.workers, [this](int signal) { signal_all(signal); }) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  children_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

void Supervisor::run() {
  if (!children_) {
    state_.start_error = errno;
    return;
  }
  state_.start_error = workers_.start();
  close_foreign_descriptors();
  while (anything_left() || !workers_.all_ended()) {
    if (workers_.is_killing() && may_end_nothing()) {
      leave_workers();
      break;
    }
    wait_for_event();
    collect_ends();
    // Here, and not where an end is noticed: between two replacements of a rank, commands count.
    workers_.replace_failed();
    send_news();
    check_deadline();
  }
  send_all_news();
}

void Supervisor::close_foreign_descriptors() const {
  std::vector<int> keep = workers_.descriptors();
  keep.insert(keep.end(), {control_, launcher_, children_.get()});
  close_all_but(std::move(keep));
}

bool Supervisor::anything_left() const {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

// Of what is left.
bool Supervisor::may_end_nothing() {
  if (!sees_processes()) return workers_.all_ended();  // what they left behind cannot be found
  const auto left = descendants(::getpid());
  if (left.empty()) {
    // /proc may hide the processes of other users (hidepid). Others end within moments.
    if (!hidden_) hidden_ = base::Deadline::after(kHidden);
    if (hidden_->expired()) state_.foreign = -1;
    return hidden_->expired();
  }
  hidden_.reset();
  for (const Process& process : left) {
    if (::kill(process.pid, SIGKILL) == 0 || errno != EPERM) return false;
  }
  state_.foreign = left.front().pid;
  return true;
}

// Counts the workers that go on, which are other users' processes, as stopped.
void Supervisor::leave_workers() {
  for (WorkerState& worker : state_.workers) {
    if (worker.pid == 0 || worker.ended) continue;
    worker.status = SIGKILL;
    worker.end = base::Deadline::Clock::now();
    worker.stopped = worker.ended = true;
  }
}

void Supervisor::wait_for_event() {
  const auto control_events = static_cast<short>(has_news() ? POLLIN | POLLOUT : POLLIN);
  std::array<pollfd, 3> fds{
      {{control_, control_events, 0}, {launcher_, POLLIN, 0}, {children_.get(), POLLIN, 0}}};
  if (workers_.is_killing()) {
    // No command matters any more, and a hang-up would end every wait.
    fds[0].fd = fds[1].fd = -1;
  }
  if (::poll(fds.data(), fds.size(), workers_.timeout()) <= 0) return;
  if (fds[1].revents != 0) {
    workers_.kill_all();
  } else if ((fds[0].revents & ~POLLOUT) != 0) {
    receive_command();
  }
  signalfd_siginfo ignored{};
  while (::read(children_.get(), &ignored, sizeof(ignored)) > 0) {
  }
}

void Supervisor::receive_command() {
  std::vector<int> command(1 + state_.workers.size());
  const ssize_t bytes = ::recv(control_, command.data(), command.size() * sizeof(int), 0);
  command.resize(bytes < 0 ? 0 : static_cast<std::size_t>(bytes) / sizeof(int));
  const int signal = command.empty() ? SIGKILL : command.front();
  if (signal == SIGKILL) {
    workers_.kill_all();
  } else if (signal == 0) {
    workers_.fail(std::span(command).subspan(1));
  } else if (signal == SIGSTOP || signal == SIGCONT) {
    workers_.set_suspended(signal == SIGSTOP);
    signal_all(signal);
  } else {
    workers_.stop(signal);
  }
}

void Supervisor::collect_ends() {
  workers_.collect_ends();
  int status = 0;
  for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    workers_.record_end(pid, status);  // or it was left behind by a worker
  }
}

bool Supervisor::has_news() const {
  return losses_sent_ < workers_.losses().size() || (workers_.has_failed() && !failure_sent_);
}

// As much as the launcher takes now.
void Supervisor::send_news() {
  const auto send = [&](const void* data, std::size_t size) {
    return ::send(control_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
  };
  while (losses_sent_ < workers_.losses().size()) {
    if (!send(&workers_.losses()[losses_sent_], sizeof(Loss))) return;
    ++losses_sent_;
  }
  if (workers_.has_failed() && !failure_sent_) failure_sent_ = send("", 1);
}

// Unless the launcher has ended.
void Supervisor::send_all_news() {
  for (send_news(); has_news(); send_news()) {
    std::array<pollfd, 2> fds{{{control_, POLLOUT, 0}, {launcher_, POLLIN, 0}}};
    ::poll(fds.data(), fds.size(), -1);
    if (fds[1].revents != 0 || (fds[0].revents & (POLLHUP | POLLERR)) != 0) return;
  }
}

void Supervisor::check_deadline() {
  if (!workers_.all_ended() || workers_.is_stopping()) return workers_.check_deadline();
  if (anything_left()) workers_.stop(SIGTERM);  // left behind by the workers
}

// Signals a worker's group while its leader is not reaped, so that the number is certainly its own.
// Signals each other process by itself: the rest of a group, and processes in other sessions.
void Supervisor::signal_all(int signal) {
  for (const WorkerState& worker : state_.workers) {
    if (worker.pid != 0 && !worker.ended) ::kill(-worker.pid, signal);
  }
  for (const Process& process : descendants(::getpid())) {
    if (!in_live_group(process)) ::kill(process.pid, signal);
  }
}

bool Supervisor::in_live_group(const Process& process) const {
  return std::any_of(state_.workers.begin(), state_.workers.end(), [&](const WorkerState& worker) {
    return worker.pid == process.group && !worker.ended;
  });
}

// Tells the launcher that nothing is left, and waits until it hangs up or has ended.
void await_hang_up(int control, int launcher) {
  ::shutdown(control, SHUT_WR);
  std::array<pollfd, 2> fds{{{control, POLLIN, 0}, {launcher, POLLIN, 0}}};
  int ignored = 0;
  do {
    ::poll(fds.data(), fds.size(), -1);
  } while (fds[1].revents == 0 && ::recv(control, &ignored, sizeof(ignored), MSG_DONTWAIT) > 0);
}

// The last thing that the supervisor does, and the guard once more.
[[noreturn]] void leave(const Plan& plan) {
  std::error_code error;
  if (!plan.directory.empty()) std::filesystem::remove_all(plan.directory, error);
  ::_exit(0);
}

[[noreturn]] void supervise(const Plan& plan, SharedState& state, int control, int launcher) {
  set_process_title("job-supervisor");
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Supervisor(plan, state, control, launcher).run();
  await_hang_up(control, launcher);
  leave(plan);
}

}  // namespace

void guard(const Plan& plan, SharedState& state, int control, int launcher) {
  // Its own group, so that a signal to the launcher's, as from Ctrl-C, does not reach it.
  ::setpgid(0, 0);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::signal(SIGCHLD, SIG_DFL);
  const pid_t supervisor = ::fork();
  if (supervisor == 0) supervise(plan, state, control, launcher);
  if (supervisor < 0) {
    state.start_error = errno;
    await_hang_up(control, launcher);
    leave(plan);
  }
  state.supervisor = supervisor;
  set_process_title("job-guard");
  close_all_but({control, launcher});
  // Reaped only after the launcher's hang-up: until then it may signal the supervisor, and a number
  // that is reaped may be another process's.
  siginfo_t end{};
  ::waitid(P_PID, static_cast<id_t>(supervisor), &end, WEXITED | WNOWAIT);
  if (end.si_code != CLD_EXITED || end.si_status != 0) kill_descendants(supervisor);
  await_hang_up(control, launcher);
  ::waitpid(supervisor, nullptr, 0);
  leave(plan);
}

}  // namespace paceline::launch
