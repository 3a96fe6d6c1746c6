#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace paceline::mpi {

// Between two tests of an operation that waits for other ranks: MPI has no wait with a deadline,
// and its own waits keep a core busy.
class Pause {
 public:
  // Longer pauses would slow down MPI, which moves large messages only while it is called.
  static constexpr std::chrono::microseconds kLongest{100};

  // How long to sleep before the next test; zero: yield.
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

}  // namespace paceline::mpi
