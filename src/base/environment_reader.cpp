#include "base/environment_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include <paceline/error.h>

namespace paceline::base {
namespace {

template <typename Integer>
Integer parse(const char* name, std::string_view text, Integer low, Integer high) {
  Integer value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    throw UsageError(fmt::format("{}={} is not an integer {}", name, text,
                                 high == std::numeric_limits<Integer>::max()
                                     ? fmt::format("of at least {}", low)
                                     : fmt::format("from {} to {}", low, high)));
  }
  return value;
}

}  // namespace

std::optional<std::string> EnvironmentReader::text(const char* name) const {
  const char* const value = getenv_(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int> EnvironmentReader::integer(const char* name, int low, int high) const {
  const auto value = text(name);
  if (!value) return std::nullopt;
  return parse(name, *value, low, high);
}

std::vector<std::int64_t> EnvironmentReader::integers(const char* name, std::int64_t high) const {
  std::vector<std::int64_t> values;
  const auto list = text(name);
  if (!list) return values;
  for (std::size_t begin = 0; begin <= list->size();) {
    const std::size_t end = std::min(list->find(',', begin), list->size());
    values.push_back(
        parse<std::int64_t>(name, std::string_view(*list).substr(begin, end - begin), 0, high));
    begin = end + 1;
  }
  return values;
}

int parse_integer(const char* name, std::string_view text, int low, int high) {
  return parse(name, text, low, high);
}

void check_below(const char* name, std::optional<int> value, const char* bound_name,
                 std::optional<int> bound) {
  if (value && bound && *value >= *bound) {
    throw UsageError(fmt::format("{}={} is not less than {}={}", name, *value, bound_name, *bound));
  }
}

}  // namespace paceline::base
