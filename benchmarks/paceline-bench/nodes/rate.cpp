#include "nodes/rate.h"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include <paceline/error.h>

namespace paceline::bench {
namespace {

constexpr double kLowest = 1e6 / 8;
constexpr double kHighest = 1e12 / 8;

// "mbit": a million bits; "kibps": 1024 bytes. In bytes.
std::optional<double> bytes_of_unit(std::string_view unit) {
  double factor = 1;
  const std::size_t prefix = std::string_view("kmgt").find(unit.empty() ? ' ' : unit[0]);
  if (prefix != std::string_view::npos) {
    unit.remove_prefix(1);
    const bool binary = unit.starts_with('i');
    if (binary) unit.remove_prefix(1);
    factor = std::pow(binary ? 1024 : 1000, prefix + 1);
  }
  if (unit == "bit") return factor / 8;
  if (unit == "bps") return factor;
  return std::nullopt;
}

}  // namespace

double bytes_per_second(const std::string& rate) {
  double number = 0;
  const auto [end, error] = std::from_chars(rate.data(), rate.data() + rate.size(), number);
  std::string unit(static_cast<const char*>(end), rate.data() + rate.size());
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto bytes = bytes_of_unit(unit);
  if (error == std::errc() && bytes && number * *bytes >= kLowest && number * *bytes <= kHighest) {
    return number * *bytes;
  }
  throw UsageError(fmt::format(
      "--link {}: expected a rate such as 1gbit or 100mbit, from 1mbit to 1tbit", rate));
}

}  // namespace paceline::bench
