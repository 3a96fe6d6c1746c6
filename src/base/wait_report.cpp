#include "base/wait_report.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.h"

namespace paceline::base {

std::atomic<std::chrono::milliseconds> WaitReport::first{std::chrono::seconds(10)};

WaitReport::State& WaitReport::state() {
  if (!state_) state_ = std::make_unique<State>();
  return *state_;
}

Deadline WaitReport::next_check(const Deadline& deadline) {
  const auto due = state().begin + state().due;  // the first call starts the clock
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - Clock::now());
  return Deadline::after(std::min(left, deadline.remaining()));
}

std::optional<WaitReport::Clock::time_point> WaitReport::next_due() {
  const auto now = Clock::now();
  if (now < state().begin + state().due) return std::nullopt;
  // A process that was itself stopped may have missed several.
  for (const auto unit = first.load(); now >= state_->begin + state_->due;) {
    state_->due = state_->due < 6 * unit    ? 6 * unit
                  : state_->due < 30 * unit ? 30 * unit
                                            : 2 * state_->due;
  }
  const auto since = std::exchange(state_->since, now);
  return has_log_callback() ? std::optional(since) : std::nullopt;
}

std::string WaitReport::waited() const {
  const std::chrono::duration<double> time = Clock::now() - state_->begin;
  return time < std::chrono::seconds(10) ? fmt::format("{:.1f} s", time.count())
                                         : fmt::format("{:.0f} s", time.count());
}

void WaitReport::write(const std::optional<Text>& text) {
  if (!text) return;
  state_->wait = text->wait;
  state_->exceptions = std::uncaught_exceptions();
  log_message(LogLevel::warning, text->line);
}

void WaitReport::end() const noexcept {
  if (state_->wait.empty() || std::uncaught_exceptions() > state_->exceptions) return;
  try {
    log(LogLevel::info, "{} went on after {}", state_->wait, waited());
  } catch (const std::exception&) {
    // No memory for the line.
  }
}

}  // namespace paceline::base
