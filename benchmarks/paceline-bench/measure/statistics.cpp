#include "measure/statistics.h"

#include <algorithm>
#include <cmath>

namespace paceline::bench {
namespace {

double quantile_of_sorted(std::span<const double> sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

// How many samples may be cut off at each end so that the median lies among the rest with 90 %
// confidence. Each sample is above or below the median with equal probability, for any
// distribution: the interval needs no assumption about the noise, whose tail is long.
std::size_t samples_to_cut(std::size_t n) {
  const double count = static_cast<double>(n);
  double tail = 0;
  std::size_t cut = 0;
  for (; 2 * cut + 1 < n; ++cut) {
    const double k = static_cast<double>(cut);
    tail += std::exp(std::lgamma(count + 1) - std::lgamma(k + 1) - std::lgamma(count - k + 1) -
                     count * std::log(2.0));
    if (tail > 0.05) break;
  }
  return cut == 0 ? 0 : cut - 1;
}

}  // namespace

double quantile(std::span<const double> samples, double q) {
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  return quantile_of_sorted(sorted, q);
}

Interval median_interval(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t cut = samples_to_cut(samples.size());
  return {quantile_of_sorted(samples, 0.5), samples[cut], samples[samples.size() - 1 - cut]};
}

Interval paired_speedup(std::span<const double> ours, std::span<const double> theirs) {
  std::vector<double> ratios(ours.size());
  std::transform(theirs.begin(), theirs.end(), ours.begin(), ratios.begin(), std::divides<>());
  return median_interval(std::move(ratios));
}

}  // namespace paceline::bench
