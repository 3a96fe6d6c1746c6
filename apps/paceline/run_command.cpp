#include "run_command.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/address.h"
#include "base/cores.h"
#include "launch/console.h"
#include "launch/filtered_log.h"
#include "launch/job.h"
#include "launch/log_directory.h"
#include "launch/non_blocking_writer.h"
#include "launch/program.h"
#include "launch/report.h"
#include "launch/signal_forwarding.h"
#include "line_prefix.h"
#include "run_cores.h"
#include "run_nodes.h"
#include "run_options.h"

namespace paceline::app {
namespace {

namespace fs = std::filesystem;

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

// One that came when the job had ended already; 0 if there is none.
int late_signal(launch::SignalForwarding& signals) {
  int signal = signals.next();
  while (signal == SIGTSTP) signal = signals.next();
  return signal;
}

// What a user reads when the processes start.
std::string heading(const RunOptions& options, const RunCores& chosen, int cores) {
  const launch::JobSpec& job = options.job;
  const std::string node =
      job.nodes == 1
          ? ""
          : fmt::format("node {} of {}, {} of {}: ", job.node, job.nodes,
                        launch::name_ranks(job.first_rank, job.processes), job.world_size);
  return fmt::format("paceline: {}{}, {} ({}){}{}\n", node,
                     plural(job.processes, "process", "processes"), chosen.threads,
                     plural(cores, "core", "cores"), chosen.binding,
                     options.deterministic ? ", deterministic" : "");
}

// The logs of all ranks together, by stream; each may be missing.
class FilteredLogs {
 public:
  FilteredLogs(const OutputOptions& output, const std::vector<std::string>& prefixes,
               const fs::path& directory) {
    for (const auto stream : {launch::Stream::out, launch::Stream::err}) {
      const auto index = static_cast<std::size_t>(stream);
      if (!output.filters[index]) continue;
      logs_[index].emplace(directory / kNames[index], *output.filters[index], prefixes);
    }
  }

  void write(int rank, launch::Stream stream, std::string_view bytes) {
    if (auto& log = logs_[static_cast<std::size_t>(stream)]) log->write(rank, bytes);
  }
  void finish() {
    for (auto& log : logs_) {
      if (log) log->finish();
    }
  }

 private:
  static constexpr std::array<const char*, 2> kNames{"filtered_stdout.log", "filtered_stderr.log"};
  std::array<std::optional<launch::FilteredLog>, 2> logs_;
};

// What the parent left ignored stays so.
void handle(int signal, void (*handler)(int)) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  if (action.sa_handler != SIG_IGN) ::signal(signal, handler);
}

// A write that fails must not end the launcher. Handlers rather than SIG_IGN: the program of a
// worker gets the default action, unless this process was started with SIG_IGN.
void survive_failed_writes() {
  for (const int signal : {SIGPIPE, SIGXFSZ}) handle(signal, [](int) {});
}

// Starts all processes once. `logs`: the directory of the run; empty: none is kept. `attempt`
// counts the starts; not all follow a failure.
launch::JobResult run_once(RunOptions& options, const fs::path& logs, int attempt,
                           launch::NonBlockingWriter& out, launch::NonBlockingWriter& err) {
  launch::JobSpec& spec = options.job;
  const OutputOptions& output = options.output;
  if (!logs.empty()) spec.directory = logs / fmt::format("attempt_{}", attempt);
  const auto prefixes = make_line_prefixes(output.prefix_template, spec);
  const std::optional<int> bar_rank = spec.first_rank == 0 ? std::optional(0) : std::nullopt;
  // Passed to the worker only if both are terminals, so that a bar is seen on either.
  const int least = std::min(terminal_columns(STDOUT_FILENO), terminal_columns(STDERR_FILENO));
  spec.terminal_columns =
      least > 0 && bar_rank ? launch::Console::columns_beside(prefixes[0], least) : 0;
  FilteredLogs filtered(output, prefixes, spec.directory);
  const int screen = ::isatty(STDOUT_FILENO) != 0 ? STDOUT_FILENO : STDERR_FILENO;
  launch::Console console(target(out), target(err), prefixes, bar_rank,
                          [=] { return terminal_columns(screen); });
  spec.output = [&](int rank, launch::Stream stream, std::string_view bytes) {
    if (output.shown_ranks && !output.shown_ranks->contains(rank)) return;
    console.write(rank, stream, bytes);
    if (output.is_teed(rank, stream)) filtered.write(rank, stream, bytes);
  };
  spec.lost = [&](int rank, const launch::RankResult& end, int replacement, int error) {
    err.write(launch::describe_loss(spec.first_rank + rank, end, replacement, spec.max_replacements,
                                    error));
  };
  spec.warn = [&](const std::string& text) { err.write(fmt::format("paceline: {}\n", text)); };
  const auto finish_output = [&] {
    console.finish();
    try {
      filtered.finish();
      if (!logs.empty()) launch::check_writable(logs);
    } catch (const Error& error) {
      err.write(
          fmt::format("paceline: {}; output of this job may be missing there\n", error.what()));
    }
  };
  launch::JobResult result;
  try {
    result = launch::run_job(spec);
  } catch (...) {
    finish_output();
    throw;
  }
  if (spec.other_nodes == nullptr) result.host = base::host_name();
  finish_output();
  return result;
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
  while (result.first_failed() && spec.restart < spec.max_restarts) {
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
    if (!out.loss().empty()) throw Error(out.loss());
    return 0;
  }
  survive_failed_writes();
  launch::JobSpec& spec = options->job;
  launch::find_program(spec.command.front());  // throws before anything is printed
  const RunCores chosen = choose_cores(*options, cores);
  fs::path logs;
  if (!options->output.run_directory.empty()) {
    try {
      logs = launch::make_run_directory(options->output.run_directory);
    } catch (const Error& error) {
      throw Error(fmt::format("{}; give --log-dir a directory that can be written", error.what()));
    }
  }
  spec.writers = {&out, &err};
  launch::SignalForwarding signals(options->signals);
  spec.signals = &signals;
  const std::string logs_line =
      logs.empty() ? "" : fmt::format("paceline: logs in {}\n", logs.string());
  err.write(options->notice + logs_line);
  const auto run = [&, attempt = 0]() mutable {
    // On several nodes, only the start says which ranks these are.
    if (options->nodes || spec.restart == 0) err.write(heading(*options, chosen, cores));
    return run_once(*options, logs, attempt++, out, err);
  };
  Outcome outcome{0, 0};
  std::exception_ptr error;  // comes after what the processes have written
  try {
    if (options->nodes) {
      const auto print = [&](const std::string& text) { err.write(text); };
      const auto verdict = run_on_nodes(*options->nodes, spec, run, print);
      outcome = {verdict.exit_code, verdict.signal};
    } else {
      outcome = run_here(spec, run, err);
    }
  } catch (...) {
    error = std::current_exception();
    outcome = {1, 0};
  }
  if (outcome.signal == 0 && out.pending()) {
    if (const int signal = late_signal(signals)) outcome = {128 + signal, signal};
  }
  // While output waits for a reader, signals end this process. To process 1, the kernel drops those
  // without a handler.
  if (out.pending() || err.pending() || !out.loss().empty()) {
    if (::getpid() == 1) {
      for (const int signal : options->signals) {
        handle(signal, [](int number) { ::_exit(128 + number); });
      }
    }
    signals.unblock();
  }
  std::optional<std::chrono::seconds> timeout;
  if (outcome.exit_code != 0) timeout = kOutputTimeoutAfterFailure;
  if (outcome.signal != 0) timeout = kOutputTimeoutAfterSignal;
  out.finish(timeout);
  if (out.pending()) {
    err.write(fmt::format("paceline: standard output was not read for {} s; the rest is dropped\n",
                          timeout->count()));
  }
  if (!out.loss().empty()) err.write(fmt::format("paceline: {}\n", out.loss()));
  err.finish(timeout);
  if (error) std::rethrow_exception(error);
  return outcome.exit_code;
}

}  // namespace paceline::app
