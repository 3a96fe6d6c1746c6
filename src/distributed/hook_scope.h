#pragma once

#include <fmt/format.h>

#include <utility>

#include <paceline/error.h>

namespace paceline::distributed {

// While it lives, this thread runs hooks of a backend. Leaving a group waits for the threads that
// run hooks, so a hook that does would wait for itself, or for another hook that waits for it.
class HookScope {
 public:
  HookScope() = default;
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope() { active_ = before_; }

  static bool is_active() { return active_; }
  // Throws UsageError if this thread runs hooks.
  static void check_not_active(const char* operation) {
    if (!active_) return;
    throw UsageError(fmt::format(
        "{} is called by a hook of a backend, for which it would wait: call it once the "
        "call that failed has thrown",
        operation));
  }

 private:
  static inline thread_local bool active_ = false;
  const bool before_ = std::exchange(active_, true);
};

}  // namespace paceline::distributed
