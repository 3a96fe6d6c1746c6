#include "launch/job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/errno_error.h"
#include "base/signals_blocked.h"
#include "launch/inherited_fds.h"
#include "launch/job_output.h"
#include "launch/log_directory.h"
#include "launch/program.h"
#include "launch/signal_forwarding.h"
#include "launch/supervision.h"
#include "launch/worker_environment.h"

namespace paceline::launch {
namespace {

using base::UniqueFd;

// How long the rest of a job's output waits for a reader. After a success there is no limit.
constexpr int kOutputTimeoutAfterSignalMs = 1000;
constexpr int kOutputTimeoutAfterFailureMs = 10000;
// How often process 1 looks for orphans that have ended.
constexpr int kReapIntervalMs = 1000;

void check(const JobSpec& spec) {
  if (spec.processes < 1 || spec.processes > kMaxProcesses) {
    throw UsageError(
        fmt::format("cannot start {} processes; expected 1 to {}", spec.processes, kMaxProcesses));
  }
  if (spec.command.empty()) throw UsageError("no program given");
  if (!spec.cpus.empty() && spec.cpus.size() != static_cast<std::size_t>(spec.processes)) {
    throw UsageError(
        fmt::format("CPUs for {} ranks; expected them for {}", spec.cpus.size(), spec.processes));
  }
  const int world_size = spec.world_size != 0 ? spec.world_size : spec.processes;
  if (spec.node < 0 || spec.node >= spec.nodes || spec.first_rank < 0 ||
      spec.first_rank + spec.processes > world_size) {
    throw UsageError(fmt::format("node {} of {} cannot have ranks {} to {} of {}", spec.node,
                                 spec.nodes, spec.first_rank, spec.first_rank + spec.processes - 1,
                                 world_size));
  }
  if (spec.max_replacements < 0 || (spec.max_replacements > 0 && spec.nodes > 1)) {
    throw UsageError(fmt::format("{} replacements on {} nodes; expected 0, or any on one node",
                                 spec.max_replacements, spec.nodes));
  }
  if (!spec.destinations.empty() &&
      (spec.directory.empty() ||
       spec.destinations.size() != static_cast<std::size_t>(spec.processes))) {
    throw UsageError(fmt::format("destinations of {} ranks{}; expected them for {}, in a directory",
                                 spec.destinations.size(),
                                 spec.directory.empty() ? " without a directory" : "",
                                 spec.processes));
  }
  if (spec.master_port < 0 || spec.master_port > 65535) {
    throw UsageError(
        fmt::format("invalid port {}; expected 1 to 65535, or 0 for a free one", spec.master_port));
  }
}

// Identifies a pipe to the holder of its other end.
ino_t inode(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw base::errno_error("cannot identify a pipe");
  return info.st_ino;
}

// They only help if no file can be written, so a job does without them if there are few
// descriptors.
std::vector<UniqueFd> make_error_memories(std::size_t count) {
  std::vector<UniqueFd> memories(count);
  try {
    for (UniqueFd& memory : memories) memory = make_error_memory();
  } catch (const Error&) {
    return std::vector<UniqueFd>(count);
  }
  return memories;
}

using SignalCounts = std::map<int, int>;  // how often each has come

class Job {
 public:
  explicit Job(const JobSpec& spec);
  JobResult run();

 private:
  Worker make_worker(int local_rank, const InheritedFds& inherited_fds) const;
  std::string describe_terminal(const Worker& worker) const;
  void pass_output_until_end(Supervision& supervision);
  void pass_files(bool has_failed);
  bool handle_events(Supervision& supervision);
  std::filesystem::path error_file(int rank) const;
  std::optional<ErrorFile> error_of(int rank) const;
  std::vector<int> blamed_ranks() const;
  void report(const Loss& loss);
  void handle_signals(Supervision& supervision);
  void forward_signal(Supervision& supervision, int signal, SignalCounts& from);
  NonBlockingWriter* blocked_writer() const;
  JobResult collect(std::span<const WorkerState> workers) const;

  const JobSpec& spec_;
  const std::string file_;
  const JobDirectory directory_;
  const JobIdentity identity_;
  std::vector<UniqueFd> error_memories_;           // as far as there are descriptors
  std::vector<UniqueFd> replaced_error_memories_;  // of the last replaced process of each rank
  JobOutput output_;
  const base::Deadline::Clock::time_point started_ = base::Deadline::Clock::now();
  int signal_ = 0;  // the first
  SignalCounts own_signals_;
  SignalCounts others_signals_;
};

Job::Job(const JobSpec& spec)
    : spec_(spec),
      file_(find_program(spec.command.front())),
      directory_(spec.directory, spec.processes),
      identity_{spec.run_id.empty() ? random_run_id() : spec.run_id,
                spec.master_port != 0 ? spec.master_port : find_free_port(), directory_.path()},
      output_(spec, directory_.path()) {}

JobResult Job::run() {
  std::optional<Supervision> supervision;
  const auto ranks = static_cast<std::size_t>(spec_.processes);
  error_memories_ = make_error_memories(ranks);
  if (spec_.max_replacements > 0) replaced_error_memories_ = make_error_memories(ranks);
  if (!directory_.problem().empty() && spec_.warn) {
    spec_.warn(fmt::format("{}; the errors of ranks are {} (TMPDIR names a directory for them)",
                           directory_.problem(),
                           error_memories_.front() ? "kept in memory" : "not reported"));
  }
  {
    // Only the workers may hold these ends: a hang-up has to report their end.
    const InheritedFds inherited_fds =
        spec_.nodes == 1 ? make_inherited_fds(spec_.processes, spec_.max_replacements == 0)
                         : InheritedFds();
    const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!null) throw base::errno_error("cannot open /dev/null");
    std::vector<UniqueFd> write_ends;
    Plan plan{.workers = {},
              .first_rank = spec_.first_rank,
              .worker_mask =
                  spec_.signals != nullptr ? spec_.signals->original_mask() : base::signal_mask(),
              .failure_grace = spec_.failure_grace,
              .stop_grace = spec_.stop_grace,
              .directory = directory_.is_temporary() ? directory_.path() : "",
              .max_replacements = spec_.max_replacements,
              .tolerate_loss = spec_.tolerate_loss};
    for (int rank = 0; rank < spec_.processes; ++rank) {
      Worker& worker = plan.workers.emplace_back(make_worker(rank, inherited_fds));
      worker.standard[0] = rank == 0 && ::isatty(STDIN_FILENO) == 0 ? STDIN_FILENO : null.get();
      worker.standard[1] = write_ends.emplace_back(output_.open(rank, Stream::out)).get();
      worker.standard[2] = write_ends.emplace_back(output_.open(rank, Stream::err)).get();
      if (rank == 0 && spec_.terminal_columns > 0) {
        worker.environment.push_back(describe_terminal(worker));
      }
    }
    supervision.emplace(plan);
  }
  pass_output_until_end(*supervision);
  std::span<const WorkerState> workers;
  try {
    workers = supervision->result();
  } catch (const Error&) {
    pass_files(true);  // what the processes have written comes before the error
    throw;
  }
  if (const pid_t foreign = supervision->foreign(); foreign != 0 && spec_.warn) {
    spec_.warn(
        fmt::format("a process of this job{} is another user's, so it cannot be ended here, "
                    "and goes on",
                    foreign > 0 ? fmt::format(", {},", foreign) : ""));
  }
  pass_files(std::ranges::any_of(
      workers, [](const WorkerState& one) { return is_failure(one.status) && !one.tolerated; }));
  return collect(workers);
}

Worker Job::make_worker(int local_rank, const InheritedFds& inherited_fds) const {
  const auto index = static_cast<std::size_t>(local_rank);
  Worker worker;
  worker.file = file_;
  worker.arguments = spec_.command;
  if (spec_.pass_local_rank) worker.arguments.push_back(fmt::format("--local_rank={}", local_rank));
  if (inherited_fds.store) {
    for (const UniqueFd& socket : inherited_fds.bootstrap_sockets[index]) {
      worker.inherited.push_back(socket.get());
    }
  }
  worker.environment = worker_environment(spec_, identity_, local_rank, worker.inherited,
                                          inherited_fds.store.get(), ::environ);
  if (inherited_fds.store) worker.inherited.push_back(inherited_fds.store.get());
  if (!spec_.cpus.empty()) worker.cpus = spec_.cpus[index];
  worker.error_file = error_file(local_rank);
  worker.error_memory = error_memories_[index].get();
  if (spec_.max_replacements > 0) {
    worker.replaced_error_memory = replaced_error_memories_[index].get();
  }
  if (worker.error_memory >= 0) {
    worker.environment.push_back(fmt::format("PACELINE_ERROR_FD={}", worker.error_memory));
    worker.inherited.push_back(worker.error_memory);
    if (directory_.path().empty()) {
      std::erase(worker.environment, "TORCHELASTIC_ERROR_FILE=");
      worker.environment.push_back("TORCHELASTIC_ERROR_FILE=" + worker.error_file.string());
    }
  }
  return worker;
}

// The worker's pipes lead to the terminal; its files do too, but a bar is of no use in them.
std::string Job::describe_terminal(const Worker& worker) const {
  std::string text = fmt::format("PACELINE_TERMINAL={}", spec_.terminal_columns);
  for (const Stream stream : {Stream::out, Stream::err}) {
    if (output_.destination(0, stream) != Destination::console) continue;
    text += fmt::format(",{}", inode(worker.standard[1 + static_cast<std::size_t>(stream)]));
  }
  return text;
}

void Job::pass_output_until_end(Supervision& supervision) {
  const int signals_fd = spec_.signals != nullptr ? spec_.signals->fd() : -1;
  handle_signals(supervision);  // other nodes' requests may have come before
  for (bool ended = false; !ended;) {
    NonBlockingWriter* const blocked = blocked_writer();
    std::vector<pollfd> fds{{supervision.fd(), POLLIN, 0}, {signals_fd, POLLIN, 0}};
    int timeout = -1;
    if (blocked != nullptr) {
      fds.push_back({blocked->fd(), POLLOUT, 0});
    } else {
      timeout = output_.prepare_poll(fds);
    }
    const std::size_t outputs = fds.size() - 2;
    if (spec_.other_nodes != nullptr) {
      const auto limit = static_cast<int>(spec_.other_nodes->add_to(fds).count());
      timeout = timeout < 0 ? limit : std::min(timeout, limit);
    }
    if (::getpid() == 1) {
      supervision.reap_foreign_children();
      timeout = timeout < 0 ? kReapIntervalMs : std::min(timeout, kReapIntervalMs);
    }
    if (::poll(fds.data(), fds.size(), timeout) < 0) {
      if (errno == EINTR) continue;
      throw base::errno_error("cannot wait for the workers");
    }
    handle_signals(supervision);
    if (blocked != nullptr) blocked->write_some();
    // Checked before the output is read, so that all of it is read after the end.
    ended = fds[0].revents != 0 && handle_events(supervision);
    if (!ended && blocked == nullptr) output_.read_ready(std::span(fds).subspan(2, outputs));
  }
  output_.read_pipes();
}

// Files may hold more than memory, so they are read as fast as the console takes it. What it does
// not get is in the files.
void Job::pass_files(bool has_failed) {
  const int signals_fd = spec_.signals != nullptr ? spec_.signals->fd() : -1;
  const int timeout = signal_ != 0 ? kOutputTimeoutAfterSignalMs
                      : has_failed ? kOutputTimeoutAfterFailureMs
                                   : -1;
  while (output_.read_files()) {
    if (spec_.other_nodes != nullptr) spec_.other_nodes->receive();  // they want answers
    while (NonBlockingWriter* const blocked = blocked_writer()) {
      std::vector<pollfd> fds{{blocked->fd(), POLLOUT, 0}, {signals_fd, POLLIN, 0}};
      if (spec_.other_nodes != nullptr) spec_.other_nodes->add_to(fds);
      if (::poll(fds.data(), fds.size(), timeout) == 0) return;
      if (spec_.other_nodes != nullptr) spec_.other_nodes->receive();  // this node has ended
      const int signal = fds[1].revents != 0 ? spec_.signals->next() : 0;
      if (signal != 0 && signal != SIGTSTP) {
        if (signal_ == 0) signal_ = signal;
        return;
      }
      blocked->write_some();
    }
  }
}

// Whether nothing of the job is left.
bool Job::handle_events(Supervision& supervision) {
  using Event = Supervision::Event;
  for (;;) {
    const Event event = supervision.next_event();
    if (event == Event::none || event == Event::ended) return event == Event::ended;
    if (event == Event::lost) {
      report(supervision.loss());
    } else if (spec_.other_nodes != nullptr) {
      spec_.other_nodes->report_failure(blamed_ranks());
    }
  }
}

// Also the supervisor and the rank have its memory under this number.
std::filesystem::path Job::error_file(int rank) const {
  if (!directory_.path().empty()) return error_file_path(identity_, rank);
  return error_memory_path(error_memories_[static_cast<std::size_t>(rank)].get());
}

std::optional<ErrorFile> Job::error_of(int rank) const {
  return read_error_file(error_file(rank), error_memories_[static_cast<std::size_t>(rank)].get());
}

// By the error files of this node.
std::vector<int> Job::blamed_ranks() const {
  std::set<int> blamed;
  for (int rank = 0; rank < spec_.processes; ++rank) {
    const auto error = error_of(rank);
    if (error) blamed.insert(error->blamed_ranks.begin(), error->blamed_ranks.end());
  }
  return {blamed.begin(), blamed.end()};
}

void Job::report(const Loss& loss) {
  const auto file = error_file(loss.worker);
  RankResult end;
  end.status = loss.status;
  if (loss.late_for) end.late_for = spec_.first_rank + *loss.late_for;
  if (loss.error == 0) {
    const bool replaced = loss.replacement > 0;
    end.error =
        replaced
            ? read_error_file(replaced_error_file(file, loss.replacement),
                              replaced_error_memories_[static_cast<std::size_t>(loss.worker)].get())
            : error_of(loss.worker);
    if (replaced) output_.begin_process(loss.worker);
  }
  if (spec_.lost) spec_.lost(loss.worker, end, loss.replacement, loss.error);
}

// Those of this process, and what other nodes ask for.
void Job::handle_signals(Supervision& supervision) {
  while (const int signal = spec_.signals != nullptr ? spec_.signals->next() : 0) {
    forward_signal(supervision, signal, own_signals_);
    if (spec_.other_nodes != nullptr && signal != SIGTSTP) spec_.other_nodes->report_signal(signal);
  }
  if (spec_.other_nodes == nullptr) return;
  for (const NodeRequest& request : spec_.other_nodes->receive()) {
    if (request.signal != 0) {
      forward_signal(supervision, request.signal, others_signals_);
      continue;
    }
    std::set<int> blamed;
    for (const int rank : request.blamed_ranks) {
      const int worker = rank - spec_.first_rank;
      if (worker >= 0 && worker < spec_.processes) blamed.insert(worker);
    }
    supervision.send_failure(blamed);
  }
}

NonBlockingWriter* Job::blocked_writer() const {
  const auto found =
      std::find_if(spec_.writers.begin(), spec_.writers.end(),
                   [](const NonBlockingWriter* writer) { return writer->pending(); });
  return found == spec_.writers.end() ? nullptr : *found;
}

// One that comes to this launcher and to others is the same; only if it comes again to one of them,
// it is a second one.
void Job::forward_signal(Supervision& supervision, int signal, SignalCounts& from) {
  if (signal == SIGTSTP) {
    supervision.send(SIGSTOP);
    ::raise(SIGSTOP);
    supervision.send(SIGCONT);
    return;
  }
  const int before = std::max(own_signals_[signal], others_signals_[signal]);
  const int times = ++from[signal];
  if (times <= before) return;
  supervision.send(signal == SIGINT && times > 1 ? SIGKILL : signal);
  if (signal_ == 0) signal_ = signal;
}

JobResult Job::collect(std::span<const WorkerState> workers) const {
  JobResult result{.ranks = {}, .signal = signal_};
  for (int rank = 0; rank < spec_.processes; ++rank) {
    const WorkerState& worker = workers[static_cast<std::size_t>(rank)];
    result.ranks.push_back({.status = worker.status,
                            .ended = worker.end - started_,
                            .stopped = worker.stopped,
                            .tolerated = worker.tolerated,
                            .error = error_of(rank),
                            .last_lines = output_.last_lines(rank)});
  }
  return result;
}

}  // namespace

std::string random_run_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

JobResult run_job(const JobSpec& spec) {
  check(spec);
  return Job(spec).run();
}

}  // namespace paceline::launch
