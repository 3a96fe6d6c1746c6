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
  bool wait_for_line() const {
    return eventually([&] { return !all().empty(); });
  }

 private:
  std::chrono::milliseconds usual_;
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace paceline::test
