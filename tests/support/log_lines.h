#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/log.h>

#include "base/wait_report.h"
#include "support/eventually.h"

namespace paceline::test {

// Collects the library's messages, except those for debugging, from any thread. Waits of this
// process are reported after `first`.
class LogLines {
 public:
  explicit LogLines(std::chrono::milliseconds first) : usual_(base::WaitReport::first) {
    base::WaitReport::first = first;
    set_log_callback([this](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex_);
      if (level != LogLevel::debug) lines_.emplace_back(text);
    });
  }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;
  ~LogLines() {
    set_log_callback({});
    base::WaitReport::first = usual_;
  }

  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }
  // Whether a line matches the regular expression.
  bool has(const std::string& line) const {
    return ::testing::Value(all(), ::testing::Contains(::testing::MatchesRegex(line)));
  }
  // Waits for such a line. On a busy machine, lines may come before it that name fewer ranks,
  // because the others have yet to come to the wait.
  bool wait_for_line(const std::string& line = ".*") const {
    return eventually([&] { return has(line); });
  }

 private:
  std::chrono::milliseconds usual_;
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace paceline::test
