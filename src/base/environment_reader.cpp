#include "base/environment_reader.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include "base/parse.h"

namespace paceline::base {

std::optional<std::string> EnvironmentReader::text(const char* name) const {
  const char* const value = getenv_(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int> EnvironmentReader::integer(const char* name, int low, int high) const {
  const auto value = text(name);
  if (!value) return std::nullopt;
  return parse_integer(name, *value, low, high);
}

std::vector<std::int64_t> EnvironmentReader::integers(const char* name, std::int64_t high) const {
  std::vector<std::int64_t> values;
  const auto list = text(name);
  if (!list) return values;
  for (const std::string_view number : split_at_commas(*list)) {
    values.push_back(parse_integer<std::int64_t>(name, number, 0, high));
  }
  return values;
}

void check_below(const char* name, std::optional<int> value, const char* bound_name,
                 std::optional<int> bound) {
  if (value && bound && *value >= *bound) {
    throw UsageError(fmt::format("{}={} is not less than {}={}", name, *value, bound_name, *bound));
  }
}

}  // namespace paceline::base
