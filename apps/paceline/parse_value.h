#pragma once

#include <charconv>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::app {

// nullopt if `text` is not a number, or not within the limits.
template <typename Number>
std::optional<Number> parse_number(std::string_view text, Number low, Number high) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value >= low && value <= high ? std::optional(value) : std::nullopt;
}

// These throw UsageError naming the flag, its value and what is allowed.
int parse_integer(std::string_view flag, std::string_view text, int low, int high);
std::chrono::milliseconds parse_seconds(std::string_view flag, std::string_view text);

std::vector<std::string> split_at_commas(std::string_view text);

}  // namespace paceline::app
