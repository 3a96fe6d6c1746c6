#pragma once

#include <fmt/format.h>

#include <paceline/log.h>

#include <string_view>
#include <utility>

namespace paceline::base {

bool has_log_callback();
void log_message(LogLevel level, std::string_view message);

// "debug", "info", "warning" or "error".
std::string_view name_of(LogLevel level);

// Writes a message to a descriptor without waiting: of one that nobody reads, what it does not take
// at once is dropped.
void write_what_is_taken(int fd, std::string_view message);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (has_log_callback()) log_message(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace paceline::base
