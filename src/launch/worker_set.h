#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "launch/error_file.h"
#include "launch/start_worker.h"

namespace paceline::launch {

// The workers of a job before they start.
struct Plan {
  std::vector<Worker> workers;
  int first_rank = 0;  // of the first worker
  sigset_t worker_mask;
  std::chrono::milliseconds failure_grace;
  std::chrono::milliseconds stop_grace;
  std::filesystem::path directory{};  // removed at the end; empty: none is
  int max_replacements = 0;           // how many workers that fail are started again
  // Whether the job goes on without a worker that fails. Then it ends with rank 0, which is not
  // started again.
  bool tolerate_loss = false;
};

struct WorkerState {
  pid_t pid;  // 0: not started
  bool ended;
  bool stopped;    // it ended after the job was asked to stop
  bool tolerated;  // it failed, and the job went on without it
  int status;      // as wait() gives it
  base::Deadline::Clock::time_point end;
  int replacement;              // its number: 1, 2, ...; 0: it has replaced none
  std::optional<int> late_for;  // it was killed, since the Timeout of this worker named it
};

// Sent as bytes. A worker that failed while the job goes on, with another process in its place or
// without it.
struct Loss {
  int worker;                   // its place among the workers
  int status;                   // how it ended, as wait() gives it
  int replacement;              // the number of the one that was started: 1, 2, ...; 0: none was
  int error;                    // an errno: none could be started, and the job has failed; else 0
  std::optional<int> late_for;  // as in WorkerState
};

// The workers of a job, as children of this process. A worker that fails is replaced while the plan
// allows it, or else tolerated if the plan allows that. After the first other failure, the rest are
// asked to stop, and then killed, when the plan says. Belongs to one thread.
class WorkerSet {
 public:
  // `plan` and `states`, one for each worker, must outlive it. `signal_all` sends a signal to all
  // that is left of the job.
  WorkerSet(const Plan& plan, std::span<WorkerState> states, std::function<void(int)> signal_all);

  // Starts the workers. Returns 0; or an errno if one cannot be started, and kills the others.
  int start();

  // An epoll of pidfds that is readable while a worker has ended and has not been collected.
  int exits() const { return exits_.get(); }
  // All descriptors that it needs.
  std::vector<int> descriptors() const;
  // How long to wait for exits() at most, as poll() takes it.
  int timeout() const;

  // Reaps the workers that have ended, in this order. Throws Error if this process has reaped one
  // elsewhere.
  void collect_ends();
  // For a child that was reaped elsewhere, which need not be a worker.
  void record_end(pid_t pid, int status);
  // None runs, and none will be started again.
  bool all_ended() const;

  // Starts the failed workers again, at most once each: a worker that fails again waits for the
  // next call. Kills what the failed processes have left behind in their groups, and the workers
  // that their Timeouts name, which are started again once they have ended.
  void replace_failed();
  // While the job is suspended, replace_failed does nothing.
  void set_suspended(bool suspended) { suspended_ = suspended; }
  // So far, in order.
  const std::vector<Loss>& losses() const { return losses_; }

  // The job has failed elsewhere: as if a worker had failed now, with an error about these workers.
  void fail(std::span<const int> blamed_workers = {});
  bool has_failed() const { return phase_ > Phase::running; }
  // Stops or kills the job if it is time to.
  void check_deadline();
  void stop(int signal);
  void kill_all();
  bool is_stopping() const { return phase_ >= Phase::stopping; }
  bool is_killing() const { return phase_ == Phase::killing; }

 private:
  // A job passes through these in this order, and may skip some.
  enum class Phase { running, failing, awaiting_failures, stopping, killing };

  void watch(std::size_t rank, pid_t pid);
  void unwatch(std::size_t rank);
  bool runs(std::size_t rank) const;
  void reap(std::size_t rank);
  void record_end(std::size_t rank, int status);
  bool is_rank_0(std::size_t worker) const {
    return plan_.first_rank + static_cast<int>(worker) == 0;
  }
  bool may_replace(std::size_t rank) const;
  bool may_go_on_without(std::size_t rank) const;
  void replace(std::size_t rank);
  std::vector<std::size_t> find_late(std::size_t failed) const;
  void kill_late(std::size_t rank, std::size_t waiting);
  std::optional<ErrorFile> error_of(std::size_t rank) const;
  bool failure_under_way() const;

  const Plan& plan_;
  const std::span<WorkerState> states_;
  const std::function<void(int)> signal_all_;
  base::UniqueFd exits_;  // only it knows the order in which workers ended
  std::vector<base::UniqueFd> pidfds_;
  std::vector<std::size_t> failed_;  // to be replaced, in order
  std::vector<Loss> losses_;
  std::vector<bool> blamed_;  // by an error elsewhere
  int replaced_ = 0;
  bool suspended_ = false;
  Phase phase_ = Phase::running;
  std::optional<base::Deadline> deadline_;
  std::chrono::milliseconds kill_interval_;
  bool stop_sent_ = false;
};

}  // namespace paceline::launch
