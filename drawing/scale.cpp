#include "drawing/scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace paceline::drawing {
namespace {

// Coordinates have a hundredth of a pixel; a sum of ticks may be off by less.
constexpr double kRounding = 1e-9;
constexpr double kLargest = 1e300;

// 1, 2 or 5 times a power of ten.
double round_step(double least) {
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1 - kRounding)) return factor * power;
  }
  return 10 * power;
}

}  // namespace

Scale::Scale(std::span<const double> values, Kind kind, Ends ends, int most_ticks) : kind_(kind) {
  std::vector<double> shown;
  std::ranges::copy_if(values, std::back_inserter(shown), [this](double x) { return shows(x); });
  if (shown.empty()) shown = {1};
  low_ = std::ranges::min(shown);
  high_ = std::ranges::max(shown);
  kind == Kind::linear ? set_linear(ends, most_ticks) : set_logarithmic(ends, most_ticks);
}

void Scale::set_linear(Ends ends, int most_ticks) {
  if (ends == Ends::round && low_ > 0 && low_ <= high_ - low_) low_ = 0;
  if (high_ - low_ <= std::max(std::abs(low_), std::abs(high_)) * kRounding) {
    const double around = low_ == 0 ? 1 : std::abs(low_) / 2;
    low_ -= around;
    high_ += around;
  }
  const double step = round_step((high_ - low_) / (most_ticks - 1));
  if (step == 0) return;  // denormal numbers
  if (ends == Ends::round) {
    low_ = std::floor(low_ / step + kRounding) * step;
    high_ = std::ceil(high_ / step - kRounding) * step;
  }
  const auto first = static_cast<std::int64_t>(std::ceil(low_ / step - kRounding));
  const auto last = static_cast<std::int64_t>(std::floor(high_ / step + kRounding));
  for (auto i = first; i <= last; ++i) ticks_.push_back(static_cast<double>(i) * step);
}

void Scale::set_logarithmic(Ends ends, int most_ticks) {
  const auto first = static_cast<int>(std::floor(std::log10(low_) + kRounding));
  auto last = static_cast<int>(std::ceil(std::log10(high_) - kRounding));
  if (last <= first) last = first + 1;
  if (ends == Ends::round || high_ - low_ <= high_ * kRounding) {
    low_ = std::pow(10, first);
    high_ = std::pow(10, last);
  }
  const auto add = [&](double tick) {
    if (tick >= low_ * (1 - kRounding) && tick <= high_ * (1 + kRounding)) ticks_.push_back(tick);
  };
  const int step = (last - first + most_ticks - 2) / (most_ticks - 1);
  const bool fine = 3 * (last - first) < most_ticks;
  for (int power = first; power <= last; power += step) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (factor == 1 || fine) add(factor * std::pow(10, power));
    }
  }
}

bool Scale::shows(double value) const {
  return std::abs(value) <= kLargest && (kind_ == Kind::linear || value >= 1 / kLargest);
}

double Scale::position(double value) const {
  const double part = kind_ == Kind::linear
                          ? (value - low_) / (high_ - low_)
                          : (std::log(value) - std::log(low_)) / (std::log(high_) - std::log(low_));
  return std::clamp(part, 0.0, 1.0);
}

std::string tick_text(double value) {
  return value == 0 ? "0" : fmt::format("{:.6g}", value);
}

}  // namespace paceline::drawing
