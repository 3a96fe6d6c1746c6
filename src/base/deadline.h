#pragma once

#include <algorithm>
#include <chrono>

namespace paceline::base {

// A point in time by which an operation must complete, and its time budget, for the message.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A century, which stands for no limit and cannot overflow the clock.
  static constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 36525);

  static Deadline after(std::chrono::milliseconds budget) {
    return {Clock::now() + std::clamp(budget, std::chrono::milliseconds(0), kLongest), budget};
  }

  bool expired() const { return Clock::now() >= at_; }
  std::chrono::milliseconds budget() const { return budget_; }
  // Never negative; rounded up, so that a wait of this length does not end early.
  std::chrono::milliseconds remaining() const {
    return std::max(std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()),
                    std::chrono::milliseconds(0));
  }

 private:
  Deadline(Clock::time_point at, std::chrono::milliseconds budget) : at_(at), budget_(budget) {}

  Clock::time_point at_;
  std::chrono::milliseconds budget_;
};

}  // namespace paceline::base
