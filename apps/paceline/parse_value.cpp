#include "parse_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include <paceline/error.h>

namespace paceline::app {

int parse_integer(std::string_view flag, std::string_view text, int low, int high) {
  const auto value = parse_number(text, low, high);
  if (value) return *value;
  throw UsageError(fmt::format("{} {}: expected a number from {} to {}", flag, text, low, high));
}

std::chrono::milliseconds parse_seconds(std::string_view flag, std::string_view text) {
  constexpr double kDay = 86400;
  const auto seconds = parse_number(text, 0.0, kDay);
  if (!seconds) {
    throw UsageError(fmt::format("{} {}: expected 0 to {} seconds", flag, text, kDay));
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1000));
}

std::vector<std::string> split_at_commas(std::string_view text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace paceline::app
