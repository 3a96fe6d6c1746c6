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
#include <cstdlib>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <utility>

#include "base/errno_error.h"
#include "base/pipe.h"
#include "launch/inherited_fds.h"
#include "launch/program.h"
#include "launch/signal_forwarding.h"
#include "launch/supervision.h"
#include "launch/tail_buffer.h"
#include "launch/worker_environment.h"

namespace paceline::launch {
namespace {

namespace fs = std::filesystem;
using base::UniqueFd;

class PrivateDirectory {
 public:
  PrivateDirectory() {
    std::error_code error;
    const fs::path parent = fs::temp_directory_path(error);
    std::string name = (error ? fs::path("/tmp") : parent) / "paceline-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) {
      throw base::errno_error(fmt::format("cannot create the directory {} for error files", name));
    }
    path_ = name;
  }
  PrivateDirectory(const PrivateDirectory&) = delete;
  PrivateDirectory& operator=(const PrivateDirectory&) = delete;
  ~PrivateDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

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
  if (spec.master_port < 0 || spec.master_port > 65535) {
    throw UsageError(
        fmt::format("invalid port {}; expected 1 to 65535, or 0 for a free one", spec.master_port));
  }
}

sigset_t own_mask() {
  sigset_t mask;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return mask;
}

// Identifies a pipe to the holder of its other end.
ino_t inode(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw base::errno_error("cannot identify a pipe");
  return info.st_ino;
}

// The output of one worker on its way to the caller.
struct Source {
  int local_rank;
  Stream stream;
  UniqueFd fd;
};

class Job {
 public:
  explicit Job(const JobSpec& spec);
  JobResult run();

 private:
  Worker make_worker(int local_rank, const InheritedFds& inherited_fds) const;
  UniqueFd add_source(int local_rank, Stream stream);
  void pass_output_until_end(Supervision& supervision);
  bool handle_end(Supervision& supervision);
  void handle_signals(Supervision& supervision);
  void forward_signal(Supervision& supervision, int signal);
  NonBlockingWriter* blocked_writer() const;
  bool read_some(Source& source);
  JobResult collect(std::span<const WorkerState> workers) const;

  const JobSpec& spec_;
  const std::string file_;
  const PrivateDirectory directory_;
  const JobIdentity identity_;
  std::vector<Source> sources_;
  std::vector<TailBuffer> last_lines_;
  const base::Deadline::Clock::time_point started_ = base::Deadline::Clock::now();
  int signal_ = 0;  // the first
  bool interrupted_ = false;
};

Job::Job(const JobSpec& spec)
    : spec_(spec),
      file_(find_program(spec.command.front())),
      identity_{spec.run_id.empty() ? random_run_id() : spec.run_id,
                spec.master_port != 0 ? spec.master_port : find_free_port(), directory_.path()},
      last_lines_(static_cast<std::size_t>(spec.processes)) {}

JobResult Job::run() {
  std::optional<Supervision> supervision;
  {
    // Only the workers may hold these ends: a hang-up has to report their end.
    const InheritedFds inherited_fds =
        spec_.nodes == 1 ? make_inherited_fds(spec_.processes) : InheritedFds();
    const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!null) throw base::errno_error("cannot open /dev/null");
    std::vector<UniqueFd> write_ends;
    Plan plan{.workers = {},
              .first_rank = spec_.first_rank,
              .worker_mask = spec_.signals != nullptr ? spec_.signals->original_mask() : own_mask(),
              .failure_grace = spec_.failure_grace,
              .stop_grace = spec_.stop_grace,
              .directory = directory_.path()};
    for (int local = 0; local < spec_.processes; ++local) {
      Worker& worker = plan.workers.emplace_back(make_worker(local, inherited_fds));
      worker.standard[0] = local == 0 && ::isatty(STDIN_FILENO) == 0 ? STDIN_FILENO : null.get();
      worker.standard[1] = write_ends.emplace_back(add_source(local, Stream::out)).get();
      worker.standard[2] = write_ends.emplace_back(add_source(local, Stream::err)).get();
      if (local == 0 && spec_.terminal_columns > 0) {
        worker.environment.push_back(fmt::format("PACELINE_TERMINAL={},{},{}",
                                                 spec_.terminal_columns, inode(worker.standard[1]),
                                                 inode(worker.standard[2])));
      }
    }
    supervision.emplace(plan);
  }
  pass_output_until_end(*supervision);
  return collect(supervision->result());
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
  worker.error_file = error_file_path(identity_, local_rank);
  return worker;
}

UniqueFd Job::add_source(int local_rank, Stream stream) {
  base::Pipe pipe = base::make_pipe();
  if (::fcntl(pipe.read_end.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw base::errno_error("cannot make a pipe non-blocking");
  }
  sources_.push_back({local_rank, stream, std::move(pipe.read_end)});
  return std::move(pipe.write_end);
}

void Job::pass_output_until_end(Supervision& supervision) {
  const int signals_fd = spec_.signals != nullptr ? spec_.signals->fd() : -1;
  for (bool ended = false; !ended;) {
    NonBlockingWriter* const blocked = blocked_writer();
    std::vector<pollfd> fds{{supervision.fd(), POLLIN, 0}, {signals_fd, POLLIN, 0}};
    if (blocked != nullptr) {
      fds.push_back({blocked->fd(), POLLOUT, 0});
    } else {
      for (const Source& source : sources_) fds.push_back({source.fd.get(), POLLIN, 0});
    }
    if (spec_.other_nodes != nullptr) spec_.other_nodes->add_to(fds);
    if (::poll(fds.data(), fds.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw base::errno_error("cannot wait for the workers");
    }
    handle_signals(supervision);
    if (blocked != nullptr) blocked->write_some();
    // Checked before the output is read, so that all of it is read after the end.
    ended = fds[0].revents != 0 && handle_end(supervision);
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      while (ended && read_some(sources_[i])) {
      }
      if (!ended && blocked == nullptr && fds[i + 2].revents != 0) read_some(sources_[i]);
    }
  }
}

// Whether nothing of the job is left.
bool Job::handle_end(Supervision& supervision) {
  Supervision::Event event = supervision.next_event();
  for (; event == Supervision::Event::failed; event = supervision.next_event()) {
    if (spec_.other_nodes != nullptr) spec_.other_nodes->report_failure();
  }
  return event == Supervision::Event::ended;
}

// Those of this process, and what other nodes ask for.
void Job::handle_signals(Supervision& supervision) {
  while (const int signal = spec_.signals != nullptr ? spec_.signals->next() : 0) {
    forward_signal(supervision, signal);
    if (spec_.other_nodes != nullptr && signal != SIGTSTP) spec_.other_nodes->report_signal(signal);
  }
  if (spec_.other_nodes == nullptr) return;
  for (const int request : spec_.other_nodes->receive()) {
    if (request != 0) {
      forward_signal(supervision, request);
    } else {
      supervision.send(request);
    }
  }
}

NonBlockingWriter* Job::blocked_writer() const {
  const auto found =
      std::find_if(spec_.writers.begin(), spec_.writers.end(),
                   [](const NonBlockingWriter* writer) { return writer->pending(); });
  return found == spec_.writers.end() ? nullptr : *found;
}

// False if there is nothing to read now; closes the source at its end.
bool Job::read_some(Source& source) {
  std::array<char, 65536> buffer;
  const ssize_t size = ::read(source.fd.get(), buffer.data(), buffer.size());
  if (size == 0) source.fd.reset();
  if (size <= 0) return false;
  const std::string_view bytes(buffer.data(), static_cast<std::size_t>(size));
  last_lines_[static_cast<std::size_t>(source.local_rank)].feed(source.stream, bytes);
  if (spec_.output) spec_.output(source.local_rank, source.stream, bytes);
  return true;
}

void Job::forward_signal(Supervision& supervision, int signal) {
  if (signal == SIGTSTP) {
    supervision.send(SIGSTOP);
    ::raise(SIGSTOP);
    supervision.send(SIGCONT);
    return;
  }
  supervision.send(signal == SIGINT && interrupted_ ? SIGKILL : signal);
  interrupted_ = interrupted_ || signal == SIGINT;
  if (signal_ == 0) signal_ = signal;
}

JobResult Job::collect(std::span<const WorkerState> workers) const {
  JobResult result{.ranks = {}, .signal = signal_};
  for (std::size_t local = 0; local < workers.size(); ++local) {
    result.ranks.push_back(
        {.status = workers[local].status,
         .ended = workers[local].end - started_,
         .stopped = workers[local].stopped,
         .error = read_error_file(error_file_path(identity_, static_cast<int>(local))),
         .last_lines = last_lines_[local].lines()});
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
