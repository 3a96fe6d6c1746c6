#include "launch/worker_set.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <utility>

#include "base/errno_error.h"
#include "base/open_pidfd.h"
#include "launch/job_result.h"
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
// Between two looks at workers without a pidfd.
constexpr int kLookInterval = 10;

}  // namespace

WorkerSet::WorkerSet(const Plan& plan, std::span<WorkerState> states,
                     std::function<void(int)> signal_all)
    : plan_(plan),
      states_(states),
      signal_all_(std::move(signal_all)),
      pidfds_(states.size()),
      blamed_(states.size()),
      kill_interval_(kFirstKillInterval) {}

int WorkerSet::start() {
  exits_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!exits_) return errno;
  for (std::size_t rank = 0; rank < plan_.workers.size(); ++rank) {
    const int error =
        start_worker(plan_.workers[rank], plan_.worker_mask, [&](pid_t pid) { watch(rank, pid); });
    if (error == 0) continue;
    pidfds_[rank].reset();
    states_[rank].pid = 0;
    kill_all();
    return error;
  }
  return 0;
}

void WorkerSet::watch(std::size_t rank, pid_t pid) {
  states_[rank].pid = pid;
  pidfds_[rank] = base::open_pidfd(pid);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = rank}};
  // Without it the worker's end is noticed later, with less certainty about the order.
  if (::epoll_ctl(exits_.get(), EPOLL_CTL_ADD, pidfds_[rank].get(), &event) != 0) {
    pidfds_[rank].reset();
  }
}

void WorkerSet::unwatch(std::size_t rank) {
  // Closing it is not enough: a process that another thread forked may have a copy.
  ::epoll_ctl(exits_.get(), EPOLL_CTL_DEL, pidfds_[rank].get(), nullptr);
  pidfds_[rank].reset();
}

std::vector<int> WorkerSet::descriptors() const {
  std::vector<int> all{exits_.get()};
  for (const UniqueFd& pidfd : pidfds_) all.push_back(pidfd.get());
  for (const Worker& worker : plan_.workers) {
    all.insert(all.end(), {worker.error_memory, worker.replaced_error_memory});
  }
  if (plan_.max_replacements == 0) return all;
  // Also these numbers, which start_worker gives to the worker's own.
  all.insert(all.end(), {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO});
  for (const Worker& worker : plan_.workers) {
    all.insert(all.end(), worker.standard.begin(), worker.standard.end());
    all.insert(all.end(), worker.inherited.begin(), worker.inherited.end());
  }
  return all;
}

bool WorkerSet::runs(std::size_t rank) const {
  return states_[rank].pid != 0 && !states_[rank].ended;
}

int WorkerSet::timeout() const {
  const int left = deadline_ ? static_cast<int>(std::min<std::int64_t>(
                                   deadline_->remaining().count(), std::numeric_limits<int>::max()))
                             : -1;
  for (std::size_t rank = 0; rank < pidfds_.size(); ++rank) {
    if (runs(rank) && !pidfds_[rank])
      return left < 0 ? kLookInterval : std::min(left, kLookInterval);
  }
  return left;
}

void WorkerSet::collect_ends() {
  epoll_event event{};
  while (::epoll_wait(exits_.get(), &event, 1, 0) == 1) reap(event.data.u64);
  for (std::size_t rank = 0; rank < pidfds_.size(); ++rank) {
    if (runs(rank) && !pidfds_[rank]) reap(rank);
  }
}

// Does not wait: the kernel keeps the end of a process from its parent until a debugger that traces
// it has taken notice. The pidfd is readable by then, so it is of no use any more.
void WorkerSet::reap(std::size_t rank) {
  int status = 0;
  pid_t pid = 0;
  do {
    pid = ::waitpid(states_[rank].pid, &status, WNOHANG);
  } while (pid < 0 && errno == EINTR);
  if (pid == 0) return unwatch(rank);
  const int code = errno;
  record_end(rank, status);
  if (pid > 0) return;
  throw base::errno_error(
      fmt::format(
          "the end of rank {} (process {}) is unknown: something else in this process, such "
          "as a handler of SIGCHLD, waits for its child processes",
          rank, states_[rank].pid),
      code);
}

void WorkerSet::record_end(pid_t pid, int status) {
  for (std::size_t rank = 0; rank < states_.size(); ++rank) {
    if (states_[rank].pid == pid && runs(rank)) record_end(rank, status);
  }
}

void WorkerSet::record_end(std::size_t rank, int status) {
  WorkerState& worker = states_[rank];
  worker.status = status;
  worker.end = Deadline::Clock::now();
  worker.stopped = stop_sent_;
  worker.ended = true;
  unwatch(rank);
  if (!is_failure(status)) return;
  if (may_replace(rank)) return failed_.push_back(rank);
  if (!may_go_on_without(rank)) return fail();
  worker.tolerated = true;
  losses_.push_back({static_cast<int>(rank), status, 0, 0, {}});
}

// The ranks of a job leave it together: a rank that fails after another one has finished has nobody
// to go on with. Where others may be lost, rank 0 holds what they need: no new process has that.
bool WorkerSet::may_replace(std::size_t rank) const {
  const auto killed = std::ranges::count_if(
      states_, [](const WorkerState& worker) { return worker.late_for && !worker.ended; });
  const auto replaced = replaced_ + std::ssize(failed_) + killed;
  return phase_ == Phase::running && replaced < plan_.max_replacements &&
         !(plan_.tolerate_loss && is_rank_0(rank)) &&
         std::ranges::none_of(states_, [](const WorkerState& worker) {
           return worker.ended && !is_failure(worker.status);
         });
}

bool WorkerSet::may_go_on_without(std::size_t rank) const {
  return phase_ == Phase::running && plan_.tolerate_loss && !is_rank_0(rank);
}

void WorkerSet::replace_failed() {
  if (suspended_) return;
  std::vector<std::pair<std::size_t, std::size_t>> late;  // and who waited
  for (const std::size_t rank : std::exchange(failed_, {})) {
    if (phase_ != Phase::running) return;
    for (const std::size_t other : find_late(rank)) late.emplace_back(other, rank);
    replace(rank);
  }
  for (const auto& [rank, waiting] : late) kill_late(rank, waiting);
}

// The workers that run, and that the error of a failed one is certainly about: a process that is
// younger may have replaced the one that is meant.
std::vector<std::size_t> WorkerSet::find_late(std::size_t failed) const {
  std::vector<std::size_t> late;
  const auto error = error_of(failed);
  if (!error || !error->is_timeout) return late;
  for (const int blamed : error->blamed_ranks) {
    const auto rank = static_cast<std::size_t>(blamed - plan_.first_rank);
    if (rank < states_.size() && runs(rank) &&
        states_[rank].replacement <= states_[failed].replacement) {
      late.push_back(rank);
    }
  }
  return late;
}

void WorkerSet::kill_late(std::size_t rank, std::size_t waiting) {
  if (!runs(rank) || states_[rank].late_for || !may_replace(rank)) return;
  states_[rank].late_for = static_cast<int>(waiting);
  ::kill(states_[rank].pid, SIGKILL);
}

void WorkerSet::replace(std::size_t rank) {
  WorkerState& state = states_[rank];
  const WorkerState before = std::exchange(state, {});
  // The number of a group is free again only once all of its processes have ended.
  for (const Process& left : descendants(::getpid())) {
    if (left.group == before.pid) ::kill(left.pid, SIGKILL);
  }
  Worker worker = plan_.workers[rank];
  const int number = ++replaced_;
  worker.environment.push_back(fmt::format("PACELINE_REPLACEMENT={}", number));
  // The file has to be that of the new process from now on.
  const auto kept = replaced_error_file(worker.error_file, number);
  std::error_code ignored;
  std::filesystem::rename(worker.error_file, kept, ignored);
  if (worker.error_memory >= 0) {
    const auto memory = error_memory_path(worker.error_memory);
    std::filesystem::copy_file(memory, error_memory_path(worker.replaced_error_memory),
                               std::filesystem::copy_options::overwrite_existing, ignored);
    std::filesystem::resize_file(memory, 0, ignored);
  }
  const int error = start_worker(worker, plan_.worker_mask, [&](pid_t pid) { watch(rank, pid); });
  losses_.push_back({static_cast<int>(rank), before.status, number, error, before.late_for});
  state.replacement = number;
  if (error == 0) return;
  std::filesystem::rename(kept, worker.error_file, ignored);
  pidfds_[rank].reset();
  state = before;
  fail();
}

void WorkerSet::fail(std::span<const int> blamed_workers) {
  for (const int worker : blamed_workers) {
    const auto index = static_cast<std::size_t>(worker);
    if (index < blamed_.size()) blamed_[index] = true;
  }
  if (phase_ != Phase::running) return;
  phase_ = Phase::failing;
  deadline_ = Deadline::after(plan_.failure_grace);
}

bool WorkerSet::all_ended() const {
  const bool none_starts = failed_.empty() || phase_ != Phase::running;
  return none_starts && std::ranges::all_of(states_, [](const WorkerState& worker) {
           return worker.pid == 0 || worker.ended;
         });
}

std::optional<ErrorFile> WorkerSet::error_of(std::size_t rank) const {
  const Worker& worker = plan_.workers[rank];
  return read_error_file(worker.error_file, worker.error_memory);
}

// Whether a rank that has not ended has written an error file, or one that has ended blames it. One
// that the job went on without may have done so long ago.
bool WorkerSet::failure_under_way() const {
  for (std::size_t rank = 0; rank < states_.size(); ++rank) {
    if (blamed_[rank] && !states_[rank].ended) return true;
    if (states_[rank].tolerated) continue;
    if (states_[rank].ended && !is_failure(states_[rank].status)) continue;
    const auto error = error_of(rank);
    if (!error) continue;
    if (!states_[rank].ended) return true;
    for (const int blamed : error->blamed_ranks) {
      const auto index = static_cast<std::size_t>(blamed - plan_.first_rank);
      if (index < states_.size() && !states_[index].ended) return true;
    }
  }
  return false;
}

void WorkerSet::check_deadline() {
  if (phase_ == Phase::awaiting_failures) {
    if (deadline_->expired() || !failure_under_way()) stop(SIGTERM);
  } else if (deadline_ && deadline_->expired()) {
    if (phase_ != Phase::failing) return kill_all();
    if (!failure_under_way()) return stop(SIGTERM);
    phase_ = Phase::awaiting_failures;
    deadline_ = Deadline::after(plan_.stop_grace);
  }
}

void WorkerSet::stop(int signal) {
  collect_ends();  // the ranks that have ended by themselves
  stop_sent_ = true;
  signal_all_(signal);
  signal_all_(SIGCONT);  // a suspended process cannot end
  if (phase_ >= Phase::stopping) return;
  phase_ = Phase::stopping;
  deadline_ = Deadline::after(plan_.stop_grace);
}

void WorkerSet::kill_all() {
  stop_sent_ = true;
  phase_ = Phase::killing;
  signal_all_(SIGKILL);
  deadline_ = Deadline::after(kill_interval_);
  kill_interval_ = std::min<std::chrono::milliseconds>(2 * kill_interval_, kLastKillInterval);
}

}  // namespace paceline::launch
