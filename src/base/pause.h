#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace paceline::base {

// Between two looks of a thread that polls for what may take long: it yields at first, then sleeps.
class Pause {
 public:
  // Longer pauses would slow down MPI, which moves large messages only while it is called.
  static constexpr std::chrono::microseconds kLongest{100};

  // How long to sleep before the next look; zero: yield.
  std::chrono::microseconds length() const {
    using std::chrono::microseconds;
    constexpr microseconds kYielding{500};
    const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - begin_);
    return waited < kYielding ? microseconds(0) : std::min(waited / 16, kLongest);
  }
  void rest() const {
    const auto length = this->length();
    if (length.count() == 0) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(length);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace paceline::base
