#pragma once

#include <sched.h>

#include <chrono>

namespace paceline::shm {

// How long a wait sleeps in the kernel before it looks after its peers; bounds how late a death is
// noticed.
inline constexpr std::chrono::milliseconds kSleepSlice{10};

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The part of a wait that comes before it sleeps in the kernel: spin, then yield.
//
// Spinning covers the skew between ranks that run side by side. It is short because ranks may share
// a core though there are enough, and yielding then lets the other one run. Where ranks outnumber
// cores there is no spinning and less yielding: a rank that yields keeps the kernel from giving its
// core to another.
class WaitLadder {
 public:
  explicit WaitLadder(bool oversubscribed) : spins_(!oversubscribed) {}

  // True once `done` returns true, false when it is time to sleep.
  template <typename Done>
  bool spin_or_yield(Done done) const {
    using Clock = std::chrono::steady_clock;
    if (spins_) {
      for (const auto end = Clock::now() + std::chrono::microseconds(2); Clock::now() < end;) {
        for (int i = 0; i < 8; ++i) {
          if (done()) return true;
          pause_cpu();
        }
      }
    }
    const std::chrono::microseconds yielding{spins_ ? 200 : 40};
    for (const auto end = Clock::now() + yielding; Clock::now() < end;) {
      ::sched_yield();
      if (done()) return true;
    }
    return false;
  }

 private:
  bool spins_;
};

}  // namespace paceline::shm
