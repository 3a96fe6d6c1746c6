#pragma once

#include <algorithm>
#include <chrono>

#include "base/deadline.h"

namespace paceline::shm {

// Detects that this process was stopped while it waited, as a suspended job is. Its peers may have
// been stopped too and still need their time, so that time does not count. For a loop that looks
// every few milliseconds.
class StopDetector {
 public:
  using Duration = std::chrono::milliseconds;

  // How long this process has not run since the last look; 0 if that was less than a second.
  Duration look() {
    const auto now = base::Deadline::Clock::now();
    const auto passed = std::chrono::floor<Duration>(now - looked_);
    looked_ = now;
    return passed >= std::chrono::seconds(1) ? passed : Duration(0);
  }

  // Moves a deadline by the time that does not count, to at most `timeout` from now.
  static void postpone(base::Deadline& deadline, Duration stopped, Duration timeout) {
    deadline = base::Deadline::after(std::min(deadline.remaining() + stopped, timeout));
  }

 private:
  base::Deadline::Clock::time_point looked_ = base::Deadline::Clock::now();
};

}  // namespace paceline::shm
