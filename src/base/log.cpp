#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace paceline {
namespace {

struct Sink {
  const pid_t process = ::getpid();
  std::mutex mutex{};
  LogCallback callback{};
};

// A forked child begins its own: another thread's call of its parent may hold the mutex for ever.
// Then the child has no callback until it sets one. Never destroyed: a thread that outlives main
// may still log.
Sink& sink() {
  static std::atomic<Sink*> instance = new Sink;
  Sink* current = instance;
  if (current->process == ::getpid()) return *current;
  auto own = std::make_unique<Sink>();
  if (const std::unique_lock lock(current->mutex, std::try_to_lock); lock) {
    own->callback = current->callback;
  }
  return instance.compare_exchange_strong(current, own.get()) ? *own.release() : *current;
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
