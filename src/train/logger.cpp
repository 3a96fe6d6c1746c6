#include <paceline/logger.h>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <string_view>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include "base/log.h"
#include "base/write_without_blocking.h"

namespace paceline {

// The rank is not looked up for each message: a callback must not call get_rank, because the
// library may hold the lock of the world when it logs.
Logger::Logger(const LoggerOptions& options) : options_(options), rank_(get_rank()) {
  if (options.output == nullptr || ::fileno(options.output) < 0) {
    throw UsageError("Logger: output is not an open file with a descriptor");
  }
}

void Logger::operator()(LogLevel level, std::string_view text) const {
  if (level < (rank_ == 0 ? options_.level : options_.other_ranks_level)) return;
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm local{};
  ::localtime_r(&seconds, &local);
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  base::write_without_blocking(::fileno(options_.output),
                               fmt::format("{:%Y-%m-%d %H:%M:%S}.{:03} rank {} {}: {}\n", local,
                                           milliseconds, rank_, base::name_of(level), text));
}

}  // namespace paceline
