#pragma once

/// @file
/// Saving before a job is ended from outside.

#include <memory>
#include <optional>
#include <vector>

#include <paceline/api.h>
#include <paceline/distributed.h>

namespace paceline {

/// Options of Preemption. The same on all ranks.
struct PreemptionOptions {
  /// The signals that ask the job to end. Unset: SIGTERM, SIGUSR1, and what the launcher passes
  /// on (`--signals-to-handle`, which also has SIGINT, of Ctrl-C, by default).
  std::optional<std::vector<int>> signals = std::nullopt;
  ProcessGroup group{};  ///< The ranks that end together.
};

/// Notices that the job is asked to end, as by a scheduler that needs the machine, so that it can
/// save first:
///
///     paceline::Preemption preemption;
///     for (...) {
///       ...; optimizer.step(); ++step;
///       if (preemption.requested()) {
///         checkpoints.save(step, states);
///         return paceline::Preemption::exit_code;  // of the function that record runs
///       }
///     }
///
/// While it exists, the signals do not end the process. One that the process ignores stays ignored.
/// A signal to one rank, or to the launcher, reaches all ranks by requested(). `paceline run` waits
/// for the save, `--shutdown-timeout` at most. Then it exits with exit_code too, and does not count
/// it as a failure: no report, and no restart.
///
/// There is at most one in a process. Use it on one thread at a time, in a world.
class PACELINE_API Preemption {
 public:
  /// The code that tells a launcher, or who started it, that the job has saved and wants to go on
  /// later: EX_TEMPFAIL of sysexits.h.
  static constexpr int exit_code = 75;

  /// Handles the signals from now on. Throws UsageError if another Preemption exists, or for a
  /// signal that cannot be handled.
  explicit Preemption(PreemptionOptions options = {});
  /// Restores the handlers of before; but once requested() has returned true, the signals have no
  /// effect any more, so that the process ends with its own code.
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  /// Whether a rank has received one of the signals; the same on all ranks. Collective, a reduction
  /// of one number.
  bool requested();

 private:
  class [[gnu::visibility("hidden")]] Handlers;
  std::unique_ptr<Handlers> handlers_;
  ProcessGroup group_;
  bool requested_ = false;
};

}  // namespace paceline
