#include "launch/supervisor.h"

#include <linux/close_range.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "launch/error_file.h"
#include "launch/process_title.h"
#include "launch/process_tree.h"

namespace paceline::launch {
namespace {

using namespace std::chrono_literals;
using base::Deadline;
using base::UniqueFd;

// Killing is repeated, since processes may have been created meanwhile, at growing intervals, since
// the kernel may not be able to end some of them yet.
constexpr auto kFirstKillInterval = 10ms;
constexpr auto kLastKillInterval = 500ms;

// Above all, this closes the other ends of the sockets and pipes: their hang-up reports a worker's
// end.
void close_all_but(std::vector<int> keep) {
  std::sort(keep.begin(), keep.end());
  unsigned first = 0;
  for (const int fd : keep) {
    if (fd < 0) continue;
    const auto kept = static_cast<unsigned>(fd);
    if (kept > first) ::close_range(first, kept - 1, 0);
    first = kept + 1;
  }
  ::close_range(first, ~0U, 0);
}

class Supervisor {
 public:
  Supervisor(const Plan& plan, SharedState& state, int control, int launcher);

  void run();

 private:
  // A job passes through these in this order, and may skip some.
  enum class Phase { running, failing, awaiting_failures, stopping, killing };

  void start_workers();
  void watch(std::size_t rank, pid_t pid);
  void close_foreign_descriptors() const;
  bool anything_left() const;
  void wait_for_event();
  void receive_command();
  void collect_ends();
  void record_end(std::size_t rank, int status);
  void begin_to_fail();
  bool failure_under_way() const;
  void check_deadline();
  void stop(int signal);
  void kill_all();
  void signal_all(int signal);
  bool in_live_group(const Process& process) const;

  const Plan& plan_;
  SharedState& state_;
  const int control_;
  const int launcher_;
  UniqueFd children_;  // readable after a child has ended
  UniqueFd exits_;     // an epoll of pidfds: only it knows the order in which workers ended
  std::vector<UniqueFd> pidfds_;
  Phase phase_ = Phase::running;
  std::optional<Deadline> deadline_;
  std::chrono::milliseconds kill_interval_ = kFirstKillInterval;
  bool stop_sent_ = false;
  int ended_ = 0;
};

Supervisor::Supervisor(const Plan& plan, SharedState& state, int control, int launcher)
    : plan_(plan), state_(state), control_(control), launcher_(launcher) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  children_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  exits_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
}

void Supervisor::run() {
  if (!children_ || !exits_) {
    state_.start_error = errno;
    return;
  }
  start_workers();
  close_foreign_descriptors();
  while (anything_left()) {
    wait_for_event();
    collect_ends();
    check_deadline();
  }
}

void Supervisor::start_workers() {
  for (std::size_t rank = 0; rank < plan_.workers.size(); ++rank) {
    const int error =
        start_worker(plan_.workers[rank], plan_.worker_mask, [&](pid_t pid) { watch(rank, pid); });
    if (error != 0) {
      pidfds_.resize(rank);
      state_.workers[rank].pid = 0;
      state_.start_error = error;
      return kill_all();
    }
  }
}

void Supervisor::watch(std::size_t rank, pid_t pid) {
  state_.workers[rank].pid = pid;
  pidfds_.emplace_back(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = rank}};
  // Without it the worker's end is noticed by its SIGCHLD, with less certainty about the order.
  ::epoll_ctl(exits_.get(), EPOLL_CTL_ADD, pidfds_.back().get(), &event);
}

void Supervisor::close_foreign_descriptors() const {
  std::vector<int> keep{control_, launcher_, children_.get(), exits_.get()};
  for (const UniqueFd& pidfd : pidfds_) keep.push_back(pidfd.get());
  close_all_but(std::move(keep));
}

bool Supervisor::anything_left() const {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

void Supervisor::wait_for_event() {
  std::array<pollfd, 3> fds{
      {{control_, POLLIN, 0}, {launcher_, POLLIN, 0}, {children_.get(), POLLIN, 0}}};
  if (phase_ == Phase::killing) {
    // No command matters any more, and a hang-up would end every wait.
    fds[0].fd = fds[1].fd = -1;
  }
  const int timeout = deadline_ ? static_cast<int>(deadline_->remaining().count()) : -1;
  if (::poll(fds.data(), fds.size(), timeout) <= 0) return;
  if (fds[1].revents != 0) {
    kill_all();
  } else if (fds[0].revents != 0) {
    receive_command();
  }
  signalfd_siginfo ignored{};
  while (::read(children_.get(), &ignored, sizeof(ignored)) > 0) {
  }
}

void Supervisor::receive_command() {
  int signal = 0;
  if (::recv(control_, &signal, sizeof(signal), 0) != sizeof(signal) || signal == SIGKILL) {
    kill_all();
  } else if (signal == 0) {
    begin_to_fail();
  } else if (signal == SIGSTOP || signal == SIGCONT) {
    signal_all(signal);
  } else {
    stop(signal);
  }
}

void Supervisor::collect_ends() {
  epoll_event event{};
  while (::epoll_wait(exits_.get(), &event, 1, 0) == 1) {
    const std::size_t rank = event.data.u64;
    int status = 0;
    ::waitpid(state_.workers[rank].pid, &status, 0);
    record_end(rank, status);
  }
  int status = 0;
  for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    const auto worker =
        std::find_if(state_.workers.begin(), state_.workers.end(),
                     [&](const WorkerState& w) { return w.pid == pid && !w.ended; });
    if (worker == state_.workers.end()) continue;  // left behind by a worker
    record_end(static_cast<std::size_t>(worker - state_.workers.begin()), status);
  }
}

void Supervisor::record_end(std::size_t rank, int status) {
  WorkerState& worker = state_.workers[rank];
  worker.status = status;
  worker.end = Deadline::Clock::now();
  ++ended_;
  worker.stopped = stop_sent_;
  worker.ended = true;
  pidfds_[rank].reset();
  if (status == 0 || phase_ != Phase::running) return;
  begin_to_fail();
  ::send(control_, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Supervisor::begin_to_fail() {
  if (phase_ != Phase::running) return;
  phase_ = Phase::failing;
  deadline_ = Deadline::after(plan_.failure_grace);
}

// Whether a rank that has not ended has written an error file, or one that has ended blames it.
bool Supervisor::failure_under_way() const {
  const auto& states = state_.workers;
  for (std::size_t rank = 0; rank < states.size(); ++rank) {
    if (states[rank].ended && states[rank].status == 0) continue;
    const auto error = read_error_file(plan_.workers[rank].error_file);
    if (!error) continue;
    if (!states[rank].ended) return true;
    for (const int blamed : error->blamed_ranks) {
      const auto index = static_cast<std::size_t>(blamed - plan_.first_rank);
      if (index < states.size() && !states[index].ended) return true;
    }
  }
  return false;
}

void Supervisor::check_deadline() {
  const bool all_ended = ended_ == static_cast<int>(state_.workers.size());
  if (all_ended && phase_ < Phase::stopping) {
    if (anything_left()) stop(SIGTERM);  // left behind by the workers
  } else if (phase_ == Phase::awaiting_failures) {
    if (deadline_->expired() || !failure_under_way()) stop(SIGTERM);
  } else if (deadline_ && deadline_->expired()) {
    if (phase_ != Phase::failing) return kill_all();
    if (!failure_under_way()) return stop(SIGTERM);
    phase_ = Phase::awaiting_failures;
    deadline_ = Deadline::after(plan_.stop_grace);
  }
}

void Supervisor::stop(int signal) {
  collect_ends();  // the ranks that have ended by themselves
  stop_sent_ = true;
  signal_all(signal);
  signal_all(SIGCONT);  // a suspended process cannot end
  if (phase_ >= Phase::stopping) return;
  phase_ = Phase::stopping;
  deadline_ = Deadline::after(plan_.stop_grace);
}

void Supervisor::kill_all() {
  stop_sent_ = true;
  phase_ = Phase::killing;
  signal_all(SIGKILL);
  deadline_ = Deadline::after(kill_interval_);
  kill_interval_ = std::min<std::chrono::milliseconds>(2 * kill_interval_, kLastKillInterval);
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
