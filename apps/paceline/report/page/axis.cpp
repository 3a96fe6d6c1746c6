#include "report/page/axis.h"

#include <fmt/format.h>

#include <cmath>

namespace paceline::report {

std::vector<double> axis_ticks(double extent) {
  const double least = std::max(extent, 1e-3) / 4.2;
  const double power = std::pow(10, std::floor(std::log10(least)));
  const double unit = least <= power       ? power
                      : least <= 2 * power ? 2 * power
                      : least <= 5 * power ? 5 * power
                                           : 10 * power;
  std::vector<double> ticks;
  for (int i = 0; i * unit <= extent; ++i) ticks.push_back(i * unit);
  return ticks;
}

std::string tick_text(double microseconds) {
  if (microseconds == 0) return "0";
  if (microseconds < 1e3) return fmt::format("{:.3g} us", microseconds);
  if (microseconds < 1e6) return fmt::format("{:.3g} ms", microseconds / 1e3);
  return fmt::format("{:.6g} s", microseconds / 1e6);
}

}  // namespace paceline::report
