#include "base/log.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <utility>

#include "base/per_process.h"

namespace paceline {
namespace {

struct Sink {
  std::mutex mutex{};
  LogCallback callback{};
};

// A forked child has its parent's callback, unless a call of it was under way.
Sink& sink() {
  static base::PerProcess<Sink> instance;
  return instance.get([](Sink& before, Sink& own) {
    const std::unique_lock lock(before.mutex, std::try_to_lock);
    if (lock) own.callback = before.callback;
  });
}

}  // namespace

void set_log_callback(LogCallback callback) {
  Sink& own = sink();
  const std::lock_guard lock(own.mutex);
  own.callback = std::move(callback);
}

namespace base {

bool has_log_callback() {
  Sink& own = sink();
  const std::lock_guard lock(own.mutex);
  return static_cast<bool>(own.callback);
}

void log_message(LogLevel level, std::string_view message) {
  Sink& own = sink();
  const std::lock_guard lock(own.mutex);
  if (own.callback) own.callback(level, message);
}

std::string_view name_of(LogLevel level) {
  constexpr std::array<std::string_view, 4> kNames{"debug", "info", "warning", "error"};
  return kNames[std::min(static_cast<std::size_t>(level), kNames.size() - 1)];
}

}  // namespace base
}  // namespace paceline
