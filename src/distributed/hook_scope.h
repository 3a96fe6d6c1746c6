#pragma once

#include <fmt/format.h>

#include <utility>

#include <paceline/error.h>

namespace paceline::distributed {

// While it lives, this thread runs hooks of a backend. Leaving a group waits for the threads that
// run hooks. If a hook left a group, it could wait for itself, or two hooks for each other.
class HookScope {
 public:
  HookScope() = default;
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope() { active_ = before_; }

  // Throws UsageError if this thread runs hooks.
  static void check_not_active(const char* operation) {
    if (!active_) return;
    throw UsageError(fmt::format(
        "{} was called by a hook of a backend, and waits for hooks to end: call it once "
        "the call that failed has thrown",
        operation));
  }

 private:
  static inline thread_local bool active_ = false;
  const bool before_ = std::exchange(active_, true);
};

}  // namespace paceline::distributed
