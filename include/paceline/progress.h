#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string_view>

#include <paceline/api.h>

namespace paceline {

struct ProgressOptions {
  // How long the training is: epochs, and steps (batches) in each, both at least 1.
  int epochs = 1;
  std::int64_t steps = 1;
  // Where to write; null writes nothing. Not closed. Not null, it must outlive the Progress.
  std::FILE* output = nullptr;
  // Which rank this is of how many. Default: get_rank() and get_world_size() at construction.
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  // The width of the terminal; 0: there is none. Default: that of the terminal which `output` is,
  // or leads to through `paceline run`.
  std::optional<int> columns = std::nullopt;
  // The time between two reports. Default: 0.1 s on a terminal, 5 s elsewhere.
  std::optional<std::chrono::milliseconds> interval = std::nullopt;
  // What time it is, for tests.
  std::function<std::chrono::steady_clock::time_point()> clock = std::chrono::steady_clock::now;
};

// Tells how a training goes: epoch, step, samples per second, loss, time left. On a terminal a bar
// that is redrawn in place; elsewhere, in a log say, a line every few seconds. Either way the line
// of an epoch's last step stays. Rank 0 writes, the other ranks are silent.
//
//   paceline::Progress progress({.epochs = epochs, .steps = loader.size(), .output = stdout});
//   for (int epoch = 0; epoch < epochs; ++epoch) {
//     progress.start_epoch(epoch);
//     for (auto& [x, y] : loader.epoch(epoch)) { ...; progress.step(x.size(0), loss); }
//   }
//
// One thread at a time. A failure to write is ignored.
class PACELINE_API Progress {
 public:
  // Throws UsageError if epochs or steps are less than 1.
  explicit Progress(ProgressOptions options);
  // Ends the line of a bar that is not complete.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Epoch `epoch`, counted from 0, begins now. Time between epochs does not count.
  void start_epoch(int epoch);
  // A step is done, on this rank with so many samples. Reports the mean loss of the epoch on this
  // rank, and the samples of all ranks, taking each to be as fast as this one.
  void step(std::int64_t samples, double loss);

 private:
  using Clock = std::chrono::steady_clock;

  struct State {
    int epoch = 0;
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
