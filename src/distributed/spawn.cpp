#include <paceline/spawn.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "base/cores.h"
#include "base/environment.h"
#include "base/malloc_thresholds.h"
#include "distributed/process_state.h"
#include "distributed/spawn_calls.h"
#include "launch/child_job.h"
#include "launch/omp_threads.h"
#include "launch/report.h"
#include "launch/signal_names.h"

namespace paceline::detail {
namespace {

using distributed::SpawnCalls;

void check(const SpawnOptions& options, const SpawnCalls& calls) {
  if (options.nprocs < 1 || options.nprocs > launch::kMaxProcesses) {
    throw UsageError(fmt::format("spawn with nprocs = {}; expected 1 to {}", options.nprocs,
                                 launch::kMaxProcesses));
  }
  for (const auto grace : {options.failure_grace, options.stop_grace}) {
    if (grace.count() < 0) {
      throw UsageError(fmt::format(
          "spawn with a grace time of {} ms; failure_grace and stop_grace must not be negative",
          grace.count()));
    }
  }
  if (!distributed::ProcessState::instance().is_record_thread()) {
    throw UsageError(
        "spawn was called outside paceline::record, or on another thread: record ends the spawned "
        "processes. Wrap the body of main: int main() { return paceline::record([] { ... }); }");
  }
  if (calls.called_function) {
    throw UsageError(fmt::format(
        "spawn was called in a process that spawn has started (rank {} of {}). Call it in the "
        "parent only; if a catch (...) around the first call let this process run on, remove it",
        base::environment().rank.value_or(0), base::environment().world_size.value_or(1)));
  }
}

// The parent sees that this process has reached the call.
void mark_reached() {
  const auto file = distributed::error_file();
  std::error_code error;
  if (file) std::filesystem::resize_file(*file, 1, error);
  if (!file || error) {
    throw Error(fmt::format(
        "descriptor {} (PACELINE_ERROR_FD), which spawn passes to its processes, is closed; main "
        "must not close descriptors before it calls spawn",
        base::environment().error_fd.value_or(-1)));
  }
  ::fcntl(*base::environment().error_fd, F_SETFD, FD_CLOEXEC);
}

[[noreturn]] void call_function(const std::function<void(int)>& function, SpawnCalls& calls) {
  const auto& environment = base::environment();
  mark_reached();
  calls.called_function = true;
  try {
    function(environment.rank.value_or(0));
    calls.function_returned = true;
  } catch (...) {
    // Passed to record past the program's own handlers, which are for errors of the parent.
    calls.failure = std::current_exception();
  }
  throw distributed::SpawnedFunctionEnded();
}

// The file that this process executes, also where another one has replaced it since.
std::string own_program() {
  constexpr const char* kSelf = "/proc/self/exe";
  std::error_code error;
  const auto path = std::filesystem::read_symlink(kSelf, error);
  return !error && std::filesystem::equivalent(path, kSelf, error) ? path.string() : kSelf;
}

std::vector<std::string> read_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  return arguments;
}

// Of own_program(). Before main, which may write into their strings, as strtok does.
const std::vector<std::string> kOwnArguments = read_arguments();

const std::vector<std::string>& own_arguments() {
  if (!kOwnArguments.empty()) return kOwnArguments;
  throw Error("spawn cannot read this program's arguments from /proc/self/cmdline");
}

launch::JobSpec make_spec(const SpawnOptions& options, int call) {
  launch::JobSpec spec;
  spec.processes = options.nprocs;
  spec.command = own_arguments();
  spec.environment = base::malloc_variables();
  spec.environment["PACELINE_SPAWN"] = fmt::format("{},{}", call, ::getpid());
  // A rank of another job writes its timeline there, under one of the same names.
  if (base::environment().rank) spec.environment["PACELINE_TIMELINE"] = "";
  // Under record, this process has a debug server there.
  spec.environment["TORCH_WORKER_SERVER_SOCKET"] = "";
  spec.failure_grace = options.failure_grace;
  spec.stop_grace = options.stop_grace;
  launch::choose_omp_threads(spec, base::available_cores());
  return spec;
}

void check_reached(const launch::JobResult& result, int call) {
  std::vector<int> pending;
  for (std::size_t rank = 0; rank < result.ranks.size(); ++rank) {
    const launch::RankResult& end = result.ranks[rank];
    if (end.pending && !launch::is_failure(end.status) && !end.stopped) {
      pending.push_back(static_cast<int>(rank));
    }
  }
  if (pending.empty()) return;
  throw UsageError(fmt::format(
      "main ended in {} {} before it reached call {} of spawn. It must take the same path to it in "
      "every process; earlier calls of spawn return at once there, also if they threw here",
      pending.size() == 1 ? "rank" : "ranks", fmt::join(pending, ", "), call));
}

void check_success(const launch::JobResult& result) {
  auto first = result.first_failed();
  if (!first && result.preempted()) {
    // A launcher would start the job again; the caller of spawn has to know.
    const auto left = std::ranges::find_if(
        result.ranks, [](const launch::RankResult& rank) { return rank.status != 0; });
    first = static_cast<int>(left - result.ranks.begin());
  }
  if (!first) return;
  std::string text = launch::describe_failure(result, *first);
  text.pop_back();  // the newline of the last line
  const launch::RankResult& rank = result.ranks[static_cast<std::size_t>(*first)];
  if (rank.error) throw ProcessRaisedException(text, *first);
  if (!WIFSIGNALED(rank.status)) {
    throw ProcessExitedException(text, *first, WEXITSTATUS(rank.status), "");
  }
  const int signal = WTERMSIG(rank.status);
  throw ProcessExitedException(text, *first, -signal, launch::signal_name(signal));
}

}  // namespace

void spawn(const std::function<void(int rank)>& function, const SpawnOptions& options) {
  SpawnCalls& calls = SpawnCalls::instance();
  check(options, calls);
  const int call = ++calls.count;
  if (const auto* const spawned = distributed::spawned_process(); spawned != nullptr) {
    if (call == spawned->call) call_function(function, calls);
    return;
  }
  const auto result = launch::run_child_job(make_spec(options, call), own_program());
  check_reached(result, call);
  check_success(result);
}

}  // namespace paceline::detail
