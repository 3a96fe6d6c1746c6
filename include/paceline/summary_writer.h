#pragma once

/// @file
/// Records the values of a training run in files, for TensorBoard and for other programs.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <paceline/api.h>

namespace paceline {

/// Options of SummaryWriter.
struct SummaryWriterOptions {
  /// For a run that goes on from an earlier step: TensorBoard discards the values that an earlier
  /// process has written for this step and later ones. After a checkpoint of `step`, whose values
  /// are written, that is step + 1. metrics.jsonl keeps them; the last line of a step counts.
  std::optional<std::int64_t> purge_step = std::nullopt;
  /// The longest time that values wait in memory while others are added.
  std::chrono::milliseconds flush_interval = std::chrono::seconds(10);
  bool tensorboard = true;  ///< Whether to write TensorBoard's event files.
  bool json_lines = true;   ///< Whether to write metrics.jsonl.
  bool all_ranks = false;   ///< Whether ranks other than rank 0 write, too.
};

/// Writes values of a run to a directory on rank 0, as Python's
/// torch.utils.tensorboard.SummaryWriter:
///
///     paceline::SummaryWriter writer("runs/1");
///     writer.add_scalar("loss/train", loss.item<double>(), step);
///
/// `tensorboard --logdir runs` draws them. The file metrics.jsonl has a line of JSON for each call:
///
///     {"step": 100, "time": 1764150000.123, "loss/train": 0.25}
///
/// in which a value that is not a number or infinite is null. A process appends to metrics.jsonl,
/// and has an event file of its own, so several runs may follow each other. A process that is
/// killed leaves whole lines and records; the values of the last flush_interval are missing.
///
/// On other ranks it does nothing. Use it on one thread at a time.
class PACELINE_API SummaryWriter {
 public:
  /// Makes the directory if needed. Throws Error if that fails.
  explicit SummaryWriter(const std::filesystem::path& directory,
                         const SummaryWriterOptions& options = {});
  /// `other` may only be assigned to or destroyed afterwards.
  SummaryWriter(SummaryWriter&& other) noexcept;
  /// The same. Flushes as the destructor does.
  SummaryWriter& operator=(SummaryWriter&& other) noexcept;
  /// Flushes; errors are lost, so call flush at the end of a run.
  ~SummaryWriter();

  /// Records a value of a step. Values of one `tag` make a curve; a slash groups tags. Throws Error
  /// if a file cannot be written, and UsageError if `tag` is empty, "step", "time" or no UTF-8.
  void add_scalar(const std::string& tag, double value, std::int64_t step);
  /// The same for several values, such as the means of Metrics.
  void add_scalars(const std::map<std::string, double>& values, std::int64_t step);
  /// Writes what waits in memory. Throws Error if that fails.
  void flush();

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;  // null on a rank that does not write
};

}  // namespace paceline
