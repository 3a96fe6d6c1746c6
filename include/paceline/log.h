#pragma once

#include <functional>
#include <string_view>

#include <paceline/api.h>

namespace paceline {

enum class LogLevel { debug, info, warning, error };

// Receives one message without a trailing newline. It is called on whichever thread has something
// to say, one call at a time, and must not throw nor call back into Paceline.
using LogCallback = std::function<void(LogLevel, std::string_view)>;

// The library never prints: messages go to the callback, and nowhere while there is none.
// `record` and the commands install one that writes to stderr. An empty callback silences again.
// Safe to call from any thread.
PACELINE_API void set_log_callback(LogCallback callback);

}  // namespace paceline
