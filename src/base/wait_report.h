#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"

namespace paceline::base {

// Reports a long wait in the log: after 10 s, 60 s, 300 s and then each time after twice as long;
// and its end, if it was reported and no exception ends it. Until the first check, a report is a
// null pointer, since waits have one on their fast paths.
class WaitReport {
 public:
  using Clock = std::chrono::steady_clock;

  // After how long a wait is reported first; the others follow in proportion. Tests shorten it.
  static std::atomic<std::chrono::milliseconds> first;
  // How many ranks report, the lowest, while they do not know of each other yet.
  static constexpr int kStrangers = 3;

  struct Text {
    std::string line;  // the report
    std::string wait;  // what waits, for the report of the end: "barrier, call 2 of group world"
  };

  WaitReport() = default;
  WaitReport(const WaitReport&) = delete;
  WaitReport& operator=(const WaitReport&) = delete;
  ~WaitReport() {
    if (state_) end();
  }

  // Call again and again while the wait lasts; the first call starts the clock. If a report is due,
  // `describe(waited, since)` returns it, or nothing if another process reports the same. `waited`
  // is "10 s"; `since` is when the report before was due, or when the wait began.
  template <typename Describe>
  void check(Describe describe) {
    if (const auto since = next_due()) write(describe(waited(), *since));
  }
  // When to check next, at the latest: `deadline`, or before.
  Deadline next_check(const Deadline& deadline);
  // The wait ends without success: its end is not reported.
  void abandon() { state_.reset(); }

 private:
  struct State {
    Clock::time_point begin = Clock::now();
    Clock::time_point since = begin;
    std::chrono::milliseconds due = first;
    std::string wait{};  // empty until it is reported
    int exceptions = 0;  // in flight when it was
  };

  State& state();
  // When the report before was due, if one is due now.
  std::optional<Clock::time_point> next_due();
  std::string waited() const;
  void write(const std::optional<Text>& text);
  void end() const noexcept;

  std::unique_ptr<State> state_;
};

}  // namespace paceline::base
