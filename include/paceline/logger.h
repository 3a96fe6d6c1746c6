#pragma once

/// @file
/// Messages of a program, with the rank that wrote them.

#include <cstdio>
#include <string_view>

#include <paceline/api.h>
#include <paceline/log.h>

namespace paceline {

/// Options of Logger.
struct LoggerOptions {
  LogLevel level = LogLevel::info;  ///< The least serious messages that rank 0 writes.
  /// The same for the other ranks, which mostly say what rank 0 says.
  LogLevel other_ranks_level = LogLevel::warning;
  /// Where to write: an open file with a descriptor. Not owned. Messages bypass its buffer.
  std::FILE* output = stderr;
};

/// Writes a program's messages, each with the time, the rank and how serious it is:
///
///     const auto world = paceline::init_process_group();
///     const paceline::Logger log;
///     log.info("epoch 3 begins");          // rank 0's
///     log.warning("the sensor is noisy");  // of each rank that says it
///
///     2026-11-26 18:02:57.123 rank 3 warning: the sensor is noisy
///
/// It is a LogCallback too, so that the library's messages can go the same way:
///
///     paceline::set_log_callback(log);
///
/// The rank is that of this process at construction; before a world is formed, the one that the
/// launcher gave it. A line of up to 4096 bytes, with its time and rank, is written as a whole, so
/// that the lines of several ranks and threads do not mix. Logging never waits: what a pipe, a
/// terminal or a socket does not take at once is dropped. Safe to use from several threads at once.
class PACELINE_API Logger {
 public:
  /// Throws UsageError if `options.output` is not such a file.
  explicit Logger(const LoggerOptions& options = {});

  /// Writes a message, which may have several lines. Errors of writing are ignored.
  void operator()(LogLevel level, std::string_view text) const;
  /// What helps to find errors. By default no rank writes it.
  void debug(std::string_view text) const { (*this)(LogLevel::debug, text); }
  /// An event that a user may want to know.
  void info(std::string_view text) const { (*this)(LogLevel::info, text); }
  /// An event that the user probably did not intend.
  void warning(std::string_view text) const { (*this)(LogLevel::warning, text); }
  /// A failure.
  void error(std::string_view text) const { (*this)(LogLevel::error, text); }

 private:
  LoggerOptions options_;
  int rank_;
};

}  // namespace paceline
