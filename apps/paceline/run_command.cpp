#include "run_command.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "base/cores.h"
#include "launch/console.h"
#include "launch/job.h"
#include "launch/non_blocking_writer.h"
#include "launch/program.h"
#include "launch/report.h"
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

// Sets the threads of each process unless the user has, and returns the line that reports them.
std::string choose_threads(launch::JobSpec& spec, int cores) {
  const std::string processes = plural(spec.processes, "process", "processes");
  const char* const chosen = std::getenv("OMP_NUM_THREADS");
  if (chosen != nullptr && *chosen != '\0') {
    return fmt::format("paceline: {}, OMP_NUM_THREADS={} each ({})\n", processes, chosen,
                       plural(cores, "core", "cores"));
  }
  const int threads = std::max(1, cores / spec.processes);
  spec.environment["OMP_NUM_THREADS"] = std::to_string(threads);
  return fmt::format("paceline: {}, {} each ({})\n", processes,
                     plural(threads, "thread", "threads"), plural(cores, "core", "cores"));
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  const int cores = base::available_cores();
  std::string help;
  auto spec = parse_run_options(arguments, cores, help);
  launch::NonBlockingWriter out(STDOUT_FILENO, "standard output");
  launch::NonBlockingWriter err(STDERR_FILENO, "standard error");
  if (!spec) {
    out.write(help);
    out.finish({});
    return 0;
  }
  launch::find_program(spec->command.front());  // throws before anything is printed
  const int least = std::min(terminal_columns(STDOUT_FILENO), terminal_columns(STDERR_FILENO));
  // Passed to the worker only if both are terminals, so that a bar is seen on either.
  if (least > 0) spec->terminal_columns = launch::Console::columns_beside_prefix(least);
  const std::string heading = choose_threads(*spec, cores);
  const int screen = ::isatty(STDOUT_FILENO) != 0 ? STDOUT_FILENO : STDERR_FILENO;
  launch::Console console(target(out), target(err), spec->processes,
                          [=] { return terminal_columns(screen); });
  spec->output = [&](int rank, launch::Stream stream, std::string_view bytes) {
    console.write(rank, stream, bytes);
  };
  spec->writers = {&out, &err};
  spec->forward_signals = true;
  err.write(heading);
  const launch::JobResult result = launch::run_job(*spec);
  console.finish();
  err.write(launch::failure_report(result));
  std::optional<std::chrono::seconds> timeout;
  if (result.exit_code() != 0) timeout = kOutputTimeoutAfterFailure;
  if (result.signal != 0) timeout = kOutputTimeoutAfterSignal;
  out.finish(timeout);
  if (out.pending()) {
    err.write(fmt::format("paceline: standard output was not read for {} s; the rest is dropped\n",
                          timeout->count()));
  }
  err.finish(timeout);
  return result.exit_code();
}

}  // namespace paceline::app
