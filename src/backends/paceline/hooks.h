#pragma once

#include <torch/csrc/distributed/c10d/Hooks.hpp>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/log.h"
#include "distributed/hook_scope.h"

namespace paceline::backends {

// Hooks of one kind by their ids. Thread-safe. Hooks run without a lock, so they may call back, but
// not leave a group: see HookScope. Their exceptions are logged, since no caller could handle them.
template <typename Hook>
class Hooks {
 public:
  void add(std::int64_t id, Hook hook) {
    std::lock_guard lock(mutex_);
    hooks_[id] = std::move(hook);
    any_ = true;
  }
  // Another thread may still run the hook. To wait for it could deadlock: a hook in Python needs
  // the interpreter's lock, which the caller may hold.
  void remove(std::int64_t id) {
    std::lock_guard lock(mutex_);
    hooks_.erase(id);
  }
  bool any() const { return any_; }
  template <typename... Args>
  void run(const Args&... args) {
    if (!any_) return;  // the usual case costs no lock
    std::vector<Hook> hooks;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [id, hook] : hooks_) hooks.push_back(hook);
    }
    const distributed::HookScope scope;
    for (const Hook& hook : hooks) {
      try {
        hook(args...);
      } catch (const std::exception& error) {
        base::log(LogLevel::warning, "a hook of the backend paceline threw: {}", error.what());
      } catch (...) {
        base::log(LogLevel::warning,
                  "a hook of the backend paceline threw something other than a std::exception");
      }
    }
  }

  std::mutex mutex_;
  std::atomic<bool> any_ = false;
  std::map<std::int64_t, Hook> hooks_;
};

// The hooks of one group.
struct GroupHooks {
  Hooks<c10d::CompletionHook> completion;
  Hooks<c10d::AbortHook> abort;  // for errors about other ranks

  // Whether there has ever been one.
  bool any() const { return completion.any() || abort.any(); }
};

}  // namespace paceline::backends
