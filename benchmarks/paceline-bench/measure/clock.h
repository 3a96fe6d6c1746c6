#pragma once

#include <ctime>

namespace paceline::bench {

inline double now_us(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

}  // namespace paceline::bench
