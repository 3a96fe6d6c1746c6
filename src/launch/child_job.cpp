#include "launch/child_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <vector>

#include "base/errno_error.h"
#include "base/signals_blocked.h"
#include "launch/error_file.h"
#include "launch/inherited_fds.h"
#include "launch/worker_environment.h"
#include "launch/worker_set.h"

namespace paceline::launch {
namespace {

// /dev/null, under each of the numbers 0 to 2 that is closed and under a larger one, so that no
// other descriptor gets one of these.
class StandardStreams {
 public:
  StandardStreams() {
    do {
      const int fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      if (fd < 0) throw base::errno_error("cannot open /dev/null");
      fds_.emplace_back(fd);
    } while (fds_.back().get() <= STDERR_FILENO);
  }
  std::array<int, 3> of_child() const { return {fds_.back().get(), STDOUT_FILENO, STDERR_FILENO}; }

 private:
  std::vector<base::UniqueFd> fds_;
};

// While it lives, the kernel keeps the ends of children.
class EndsKept {
 public:
  EndsKept() {
    ::sigaction(SIGCHLD, nullptr, &before_);
    if (!drops_ends()) return;
    struct sigaction keeping = before_;
    if (keeping.sa_handler == SIG_IGN) keeping.sa_handler = SIG_DFL;
    keeping.sa_flags &= ~SA_NOCLDWAIT;
    ::sigaction(SIGCHLD, &keeping, nullptr);
  }
  EndsKept(const EndsKept&) = delete;
  EndsKept& operator=(const EndsKept&) = delete;
  ~EndsKept() {
    if (drops_ends()) ::sigaction(SIGCHLD, &before_, nullptr);
  }

 private:
  bool drops_ends() const {
    return before_.sa_handler == SIG_IGN || (before_.sa_flags & SA_NOCLDWAIT) != 0;
  }

  struct sigaction before_ {};
};

class ChildJob {
 public:
  ChildJob(const JobSpec& spec, const std::string& file);
  ChildJob(const ChildJob&) = delete;
  ChildJob& operator=(const ChildJob&) = delete;
  ~ChildJob();

  JobResult run();

 private:
  Worker make_worker(int rank, const InheritedFds& inherited_fds,
                     const StandardStreams& streams) const;
  void start();
  void signal_all(int signal) const;
  JobResult collect() const;

  const JobSpec& spec_;
  const std::string& file_;
  const EndsKept ends_kept_;
  const JobIdentity identity_;
  std::vector<base::UniqueFd> errors_;  // of the ranks, in memory
  Plan plan_;
  std::vector<WorkerState> states_;
  WorkerSet workers_;
  const base::Deadline::Clock::time_point started_ = base::Deadline::Clock::now();
};

ChildJob::ChildJob(const JobSpec& spec, const std::string& file)
    : spec_(spec),
      file_(file),
      identity_{spec.run_id.empty() ? random_run_id() : spec.run_id, find_free_port()},
      plan_{.workers = {},
            .first_rank = 0,
            .worker_mask = base::signal_mask(),
            .failure_grace = spec.failure_grace,
            .stop_grace = spec.stop_grace},
      states_(static_cast<std::size_t>(spec.processes)),
      workers_(plan_, states_, [this](int signal) { signal_all(signal); }) {}

ChildJob::~ChildJob() {
  signal_all(SIGKILL);
  for (const WorkerState& worker : states_) {
    if (worker.pid == 0 || worker.ended) continue;
    while (::waitpid(worker.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

Worker ChildJob::make_worker(int rank, const InheritedFds& inherited_fds,
                             const StandardStreams& streams) const {
  Worker worker;
  worker.file = file_;
  worker.arguments = spec_.command;
  for (const auto& socket : inherited_fds.bootstrap_sockets[static_cast<std::size_t>(rank)]) {
    worker.inherited.push_back(socket.get());
  }
  worker.environment = worker_environment(spec_, identity_, rank, worker.inherited,
                                          inherited_fds.store.get(), ::environ);
  worker.inherited.push_back(inherited_fds.store.get());
  worker.standard = streams.of_child();
  worker.own_session = false;
  const int error = errors_[static_cast<std::size_t>(rank)].get();
  worker.environment.push_back(fmt::format("PACELINE_ERROR_FD={}", error));
  worker.inherited.push_back(error);
  worker.error_file = error_memory_path(error);
  return worker;
}

void ChildJob::start() {
  const StandardStreams streams;
  const InheritedFds inherited_fds = make_inherited_fds(spec_.processes);
  for (int rank = 0; rank < spec_.processes; ++rank) {
    errors_.push_back(make_error_memory());
    plan_.workers.push_back(make_worker(rank, inherited_fds, streams));
  }
  const base::SignalsBlocked blocked;
  if (const int code = workers_.start(); code != 0) {
    throw base::errno_error(fmt::format("cannot start {} processes of {}", spec_.processes, file_),
                            code);
  }
}

JobResult ChildJob::run() {
  start();
  while (!workers_.all_ended()) {
    pollfd ends{workers_.exits(), POLLIN, 0};
    if (::poll(&ends, 1, workers_.timeout()) < 0 && errno != EINTR) {
      throw base::errno_error("cannot wait for the spawned processes");
    }
    workers_.collect_ends();
    workers_.check_deadline();
  }
  return collect();
}

// A number is certainly the worker's own while it is not reaped.
void ChildJob::signal_all(int signal) const {
  for (const WorkerState& worker : states_) {
    if (worker.pid != 0 && !worker.ended) ::kill(worker.pid, signal);
  }
}

JobResult ChildJob::collect() const {
  JobResult result;
  for (std::size_t rank = 0; rank < states_.size(); ++rank) {
    const auto& error_file = plan_.workers[rank].error_file;
    std::error_code ignored;
    result.ranks.push_back({.status = states_[rank].status,
                            .ended = states_[rank].end - started_,
                            .stopped = states_[rank].stopped,
                            .lost = false,
                            .error = read_error_file(error_file),
                            .last_lines = {},
                            .pending = std::filesystem::file_size(error_file, ignored) == 0});
  }
  return result;
}

}  // namespace

JobResult run_child_job(const JobSpec& spec, const std::string& file) {
  return ChildJob(spec, file).run();
}

}  // namespace paceline::launch
