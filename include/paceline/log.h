#pragma once

/// @file
/// Where the library's messages go.

#include <paceline/api.h>

#include <functional>
#include <string_view>

namespace paceline {

/// How serious a message is.
enum class LogLevel {
  debug,    ///< What the library does, for finding errors.
  info,     ///< An event that a user may want to know.
  warning,  ///< Something that is probably not meant, or an error that is not thrown.
  error     ///< A failure that ends the rank.
};

/// Receives one message without a trailing newline. Called on any thread, one call at a time. It
/// must not throw or call Paceline.
using LogCallback = std::function<void(LogLevel, std::string_view)>;

/// Sends the library's messages to `callback`. The library itself never prints; without a callback,
/// or after an empty one, messages are dropped. record() replaces the callback by one that writes
/// to stderr, and removes it at its end; to use your own, set it inside record(). Safe to call from
/// any thread. A forked child has its parent's callback, unless another thread was in it.
PACELINE_API void set_log_callback(LogCallback callback);

}  // namespace paceline
