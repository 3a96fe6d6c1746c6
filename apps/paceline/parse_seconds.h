#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string_view>

#include <paceline/error.h>

#include "base/parse.h"

namespace paceline::app {

// A flag's value, up to a year. Throws UsageError.
inline std::chrono::milliseconds parse_seconds(std::string_view flag, std::string_view text) {
  constexpr double kYear = 365 * 86400;
  const auto seconds = base::parse_number(text, 0.0, kYear);
  if (!seconds) {
    throw UsageError(fmt::format("{} {}: expected 0 to {} seconds", flag, text, kYear));
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
}

}  // namespace paceline::app
