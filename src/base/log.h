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

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (has_log_callback()) log_message(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace paceline::base
