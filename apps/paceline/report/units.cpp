#include "report/units.h"

#include <fmt/format.h>

#include <array>

namespace paceline::report {
namespace {

// Formats three significant figures.
std::string figures(double value, const char* unit) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, decimals, unit);
}

}  // namespace

std::string time_text(double microseconds) {
  if (microseconds < 0.005) return "0";
  if (microseconds < 999.5) return figures(microseconds, "us");
  if (microseconds < 999.5e3) return figures(microseconds / 1e3, "ms");
  return figures(microseconds / 1e6, "s");
}

std::string share_text(double part) {
  return fmt::format("{:.0f} %", 100 * part);
}

std::string bytes_text(std::uint64_t bytes) {
  constexpr std::array units{"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1023.5 && unit + 1 < units.size(); ++unit) value /= 1024;
  return figures(value, units[unit]);
}

}  // namespace paceline::report
