#pragma once

/// @file
/// Reports the progress of a training run.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string_view>

#include <paceline/api.h>

namespace paceline {

/// Options of Progress.
struct ProgressOptions {
  /// The number of epochs, at least 1.
  int epochs = 1;
  /// The number of steps (batches) in each epoch, at least 1.
  std::int64_t steps = 1;
  /// Where to write; null: nowhere. Not owned; must outlive the Progress.
  std::FILE* output = nullptr;
  /// This process's rank. Unset: get_rank() at construction.
  std::optional<int> rank = std::nullopt;
  /// The number of ranks. Unset: get_world_size() at construction.
  std::optional<int> world_size = std::nullopt;
  /// The width of the terminal in characters; 0: `output` is not a terminal. Unset: detected, also
  /// under `paceline run`.
  std::optional<int> columns = std::nullopt;
  /// The time between two reports. Unset: 0.1 s on a terminal, 5 s elsewhere.
  std::optional<std::chrono::milliseconds> interval = std::nullopt;
  /// The clock; tests replace it.
  std::function<std::chrono::steady_clock::time_point()> clock = std::chrono::steady_clock::now;
};

/// Reports the progress of a training run: epoch, step, samples per second, loss and time left. On
/// a terminal it redraws a bar in place; elsewhere, as in a log, it writes a line every few
/// seconds. In both, the line of an epoch's last step remains. Rank 0 writes; the other ranks are
/// silent.
///
///     paceline::Progress progress({.epochs = epochs, .steps = loader.size(), .output = stdout});
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       progress.start_epoch(epoch);
///       for (auto& [x, y] : loader.epoch(epoch)) { ...; progress.step(x.size(0), loss); }
///     }
///
/// Use it on one thread at a time. Errors of writing are ignored.
class PACELINE_API Progress {
 public:
  /// Throws UsageError if epochs or steps are less than 1.
  explicit Progress(ProgressOptions options);
  /// Ends the line of an incomplete bar.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Begins epoch `epoch`, counted from 0, of which `step` steps were done before, by a run that
  /// this one resumes. Time between epochs does not count. Throws UsageError for a negative step.
  void start_epoch(int epoch, std::int64_t step = 0);
  /// Counts a step of `samples` samples on this rank. The report has the epoch's mean loss on this
  /// rank, and the samples a second of all ranks, estimated as this rank's times world_size.
  void step(std::int64_t samples, double loss);

 private:
  using Clock = std::chrono::steady_clock;

  struct State {
    int epoch = 0;
    std::int64_t first = 0;  // steps of the epoch that were done before
    std::int64_t step = 0;
    std::int64_t samples = 0;
    double loss_sum = 0;
  };

  void report(Clock::time_point now, bool last);
  void write(std::string_view text);

  ProgressOptions options_;
  int world_size_;
  int columns_ = 0;
  std::chrono::milliseconds interval_{};
  State state_;
  Clock::time_point epoch_start_{};
  Clock::time_point last_report_{};
  bool line_open_ = false;
};

}  // namespace paceline
