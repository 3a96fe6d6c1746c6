#pragma once

#include <span>
#include <vector>

namespace paceline::bench {

// The value below which the fraction `q` of the samples lies, interpolated between neighbours.
// There has to be a sample.
double quantile(std::span<const double> samples, double q);

struct Interval {
  double median;
  double low;
  double high;
};

// The median of the samples and its 90 % confidence interval. There has to be a sample.
Interval median_interval(std::vector<double> samples);

// The same of theirs[i] / ours[i]. The two are times of the same
// round, so that what slowed down the whole machine for a while cancels out. As many of each,
// at least one.
Interval paired_speedup(std::span<const double> ours, std::span<const double> theirs);

}  // namespace paceline::bench
