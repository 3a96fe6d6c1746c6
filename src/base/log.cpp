#include "base/log.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <utility>

namespace paceline {
namespace {

struct Sink {
  std::mutex mutex;
  LogCallback callback;
};

// Never destroyed: a thread that outlives main may still log.
Sink& sink() {
  static Sink* const instance = new Sink;
  return *instance;
}

}  // namespace

void set_log_callback(LogCallback callback) {
  std::lock_guard lock(sink().mutex);
  sink().callback = std::move(callback);
}

namespace base {

bool has_log_callback() {
  std::lock_guard lock(sink().mutex);
  return static_cast<bool>(sink().callback);
}

void log_message(LogLevel level, std::string_view message) {
  std::lock_guard lock(sink().mutex);
  if (sink().callback) sink().callback(level, message);
}

std::string_view name_of(LogLevel level) {
  constexpr std::array<std::string_view, 4> kNames{"debug", "info", "warning", "error"};
  return kNames[std::min(static_cast<std::size_t>(level), kNames.size() - 1)];
}

}  // namespace base
}  // namespace paceline
