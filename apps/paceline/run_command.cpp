#include "run_command.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "base/cores.h"
#include "launch/console.h"
#include "launch/core_binding.h"
#include "launch/job.h"
#include "launch/non_blocking_writer.h"
#include "launch/program.h"
#include "launch/report.h"
#include "launch/signal_forwarding.h"
#include "run_nodes.h"
#include "run_options.h"

namespace paceline::app {
namespace {

// How long the remaining output waits for a reader after a signal or a failure has ended the job.
// After a success there is no limit.
constexpr std::chrono::seconds kOutputTimeoutAfterSignal{1};
constexpr std::chrono::seconds kOutputTimeoutAfterFailure{10};

launch::Console::Target target(launch::NonBlockingWriter& writer) {
  return {[&writer](std::string_view text) { writer.write(text); }, ::isatty(writer.fd()) != 0};
}

// The width of the terminal behind `fd`: 0 without a terminal, 80 if it does not report one.
int terminal_columns(int fd) {
  if (::isatty(fd) == 0) return 0;
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string plural(int count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

// Sets the threads of each process unless the user or a flag has, and returns what it has.
std::string choose_threads(launch::JobSpec& spec, int cores) {
  const char* const chosen = std::getenv("OMP_NUM_THREADS");
  if (chosen != nullptr && *chosen != '\0') return fmt::format("OMP_NUM_THREADS={} each", chosen);
  int share = std::max(1, cores / spec.processes);
  if (!spec.cpus.empty()) share = std::min(share, static_cast<int>(spec.cpus[0].size()));
  const auto variable = spec.environment.emplace("OMP_NUM_THREADS", std::to_string(share)).first;
  const int threads = std::stoi(variable->second);
  return plural(threads, "thread", "threads") + " each";
}

// Throws UsageError if the processes outnumber the cores. nullopt if too few of them are free.
std::optional<launch::CoreBinding> choose_cores(launch::JobSpec& spec, int cores) {
  if (spec.processes > cores) {
    throw UsageError(
        fmt::format("--bind-to-cores: {} processes cannot have cores of their own on {}; "
                    "start fewer, or leave the flag out",
                    spec.processes, plural(cores, "core", "cores")));
  }
  auto binding = launch::bind_to_cores(base::affinity(), spec.processes);
  if (binding) spec.cpus = binding->cpus;
  return binding;
}

// One that came when the job had ended already; 0 if there is none.
int late_signal(launch::SignalForwarding& signals) {
  int signal = signals.next();
  while (signal == SIGTSTP) signal = signals.next();
  return signal;
}

// The line that says how the job starts.
std::string heading(const RunOptions& options, const std::string& threads, int cores) {
  std::string binding;
  if (!options.job.cpus.empty()) {
    binding = fmt::format(", each on {} of its own",
                          plural(static_cast<int>(options.job.cpus[0].size()), "core", "cores"));
  } else if (options.bind_to_cores) {
    binding = ", not bound to cores: too few are free";
  }
  const launch::JobSpec& job = options.job;
  const std::string node =
      job.nodes == 1
          ? ""
          : fmt::format("node {} of {}, ranks {} to {} of {}: ", job.node, job.nodes,
                        job.first_rank, job.first_rank + job.processes - 1, job.world_size);
  return fmt::format(
      "paceline: {}{}, {} ({}){}{}\n", node, plural(job.processes, "process", "processes"), threads,
      plural(cores, "core", "cores"), binding, options.deterministic ? ", deterministic" : "");
}

// How the job ended.
struct Outcome {
  int exit_code;
  int signal;  // that ended it; 0: none did
};

// On this machine alone. `run` starts the processes once.
Outcome run_here(launch::JobSpec& spec, const std::function<launch::JobResult()>& run,
                 launch::NonBlockingWriter& err) {
  launch::JobResult result = run();
  err.write(launch::failure_report(result));
  while (result.exit_code() != 0 && spec.restart < spec.max_restarts) {
    if (result.signal == 0) result.signal = late_signal(*spec.signals);
    if (result.signal != 0) break;
    ++spec.restart;
    err.write(fmt::format("paceline: starts all processes again, restart {} of {}\n", spec.restart,
                          spec.max_restarts));
    result = run();
    err.write(launch::failure_report(result));
  }
  return {result.exit_code(), result.signal};
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  const int cores = base::available_cores();
  std::string help;
  auto options = parse_run_options(arguments, cores, help);
  launch::NonBlockingWriter out(STDOUT_FILENO, "standard output");
  launch::NonBlockingWriter err(STDERR_FILENO, "standard error");
  if (!options) {
    out.write(help);
    out.finish({});
    return 0;
  }
  launch::JobSpec& spec = options->job;
  launch::find_program(spec.command.front());  // throws before anything is printed
  const int least = std::min(terminal_columns(STDOUT_FILENO), terminal_columns(STDERR_FILENO));
  // Passed to the worker only if both are terminals, so that a bar is seen on either.
  if (least > 0) spec.terminal_columns = launch::Console::columns_beside_prefix(least);
  std::optional<launch::CoreBinding> binding;  // holds the cores until the job has ended
  if (options->bind_to_cores) binding = choose_cores(spec, cores);
  const std::string threads = choose_threads(spec, cores);
  const int screen = ::isatty(STDOUT_FILENO) != 0 ? STDOUT_FILENO : STDERR_FILENO;
  spec.writers = {&out, &err};
  std::optional<launch::SignalForwarding> signals(std::in_place, options->signals);
  spec.signals = &*signals;
  err.write(options->notice);
  if (!options->nodes) err.write(heading(*options, threads, cores));
  const auto run = [&] {
    if (options->nodes) err.write(heading(*options, threads, cores));
    if (spec.first_rank != 0) spec.terminal_columns = 0;
    launch::Console console(
        target(out), target(err), spec.processes, [=] { return terminal_columns(screen); },
        spec.first_rank);
    spec.output = [&](int rank, launch::Stream stream, std::string_view bytes) {
      const bool is_shown = !options->shown_ranks || options->shown_ranks->contains(rank);
      if (is_shown) console.write(rank, stream, bytes);
    };
    launch::JobResult result = launch::run_job(spec);
    console.finish();
    return result;
  };
  Outcome outcome{0, 0};
  if (options->nodes) {
    outcome.exit_code =
        run_on_nodes(*options->nodes, spec, run, [&](const std::string& text) { err.write(text); });
    outcome.signal = std::max(0, outcome.exit_code - 128);
  } else {
    outcome = run_here(spec, run, err);
  }
  if (outcome.signal == 0 && out.pending()) {
    if (const int signal = late_signal(*signals)) outcome = {128 + signal, signal};
  }
  signals.reset();  // from here on they end this process
  std::optional<std::chrono::seconds> timeout;
  if (outcome.exit_code != 0) timeout = kOutputTimeoutAfterFailure;
  if (outcome.signal != 0) timeout = kOutputTimeoutAfterSignal;
  out.finish(timeout);
  if (out.pending()) {
    err.write(fmt::format("paceline: standard output was not read for {} s; the rest is dropped\n",
                          timeout->count()));
  }
  err.finish(timeout);
  return outcome.exit_code;
}

}  // namespace paceline::app
