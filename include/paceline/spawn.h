#pragma once

/// @file
/// Starts the ranks from within the program, as torch.multiprocessing.spawn does.

#include <paceline/api.h>
#include <paceline/error.h>

#include <chrono>
#include <functional>
#include <type_traits>
#include <utility>

namespace paceline {

/// How many processes spawn starts, and how it ends them after a failure.
struct SpawnOptions {
  /// The number of processes, from 1 to 1024.
  int nprocs = 1;
  /// From the first failure to SIGTERM: the time in which the other ranks notice and report it. If
  /// a rank is known to be failing, SIGTERM waits for its end too, for stop_grace at most. Must not
  /// be negative.
  std::chrono::milliseconds failure_grace{500};
  /// From SIGTERM to SIGKILL. Must not be negative.
  std::chrono::milliseconds stop_grace{5000};
};

namespace detail {
PACELINE_API void spawn(const std::function<void(int rank)>& function, const SpawnOptions& options);
}

/// Runs function(rank, args...) in options.nprocs new processes on this machine, with ranks from 0
/// on, and returns when all have ended. Call it inside record(), on the same thread:
///
///     int main() {
///       return paceline::record([] {
///         paceline::spawn([](int rank, int epochs) { train(epochs); }, {.nprocs = 8}, 5);
///       });
///     }
///
/// Each process is a new one of the same program with the same arguments. It runs main again, up to
/// the same call of spawn, calls the function there, and leaves main through record(). What follows
/// the call runs in the parent only: return from main what record() returns. What comes before it
/// runs in every process, where earlier calls of spawn return at once. So main must reach the call
/// on the same path in every process.
///
/// The processes have the variables of `paceline run`, so init_process_group() works inside
/// `function`; RANK, WORLD_SIZE, MASTER_ADDR and the like of this process's own launcher are
/// replaced. They have this process's directory, standard output and standard error, an empty
/// standard input, and no other descriptor of it. They are in its process group, which Ctrl-C
/// reaches, and are killed if this process ends.
///
/// If a process fails, the others are stopped, and spawn throws about the one that failed first:
/// ProcessRaisedException if it ended by an exception, ProcessExitedException otherwise.
/// A process leaves main by an exception of a private type. If the program stops it with
/// catch (...), the process runs on behind the call.
///
/// Throws UsageError for invalid options, outside record(), on another thread than record()'s, in a
/// process that spawn has started, and if a process ended before it reached the call; Error if the
/// system refuses something. No process of the call is left when it returns or throws, except those
/// that the ranks themselves have started. While this process ignores SIGCHLD, the call gives it
/// its default handling.
template <typename Function, typename... Args>
void spawn(Function&& function, const SpawnOptions& options = {}, Args&&... args) {
  constexpr bool kTakesArguments = std::is_invocable_v<Function, int, Args...>;
  static_assert(kTakesArguments,
                "spawn calls function(rank, args...): it must take an int, and then the arguments "
                "that follow the options");
  if constexpr (kTakesArguments) {
    detail::spawn(
        [&](int rank) {
          static_cast<void>(
              std::invoke(std::forward<Function>(function), rank, std::forward<Args>(args)...));
        },
        options);
  }
}

}  // namespace paceline
