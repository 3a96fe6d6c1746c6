#include "base/log.h"

#include <mutex>
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

}  // namespace base
}  // namespace paceline
