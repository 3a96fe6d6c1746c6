#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include <paceline/error.h>

namespace paceline::base {

// The parts of `text` between commas; at least one, which may be empty.
inline std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// nullopt unless the whole text is a number from `low` to `high`.
template <typename Number>
std::optional<Number> parse_number(std::string_view text, Number low, Number high) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value >= low && value <= high ? std::optional(value) : std::nullopt;
}

// `name`: of the variable or flag that has this text. Throws UsageError naming it, its text and
// what is allowed.
template <typename Integer>
Integer parse_integer(std::string_view name, std::string_view text, Integer low,
                      Integer high = std::numeric_limits<Integer>::max()) {
  if (const auto value = parse_number(text, low, high)) return *value;
  throw UsageError(fmt::format("{}={} is not an integer {}", name, text,
                               high == std::numeric_limits<Integer>::max()
                                   ? fmt::format("of at least {}", low)
                                   : fmt::format("from {} to {}", low, high)));
}

}  // namespace paceline::base
