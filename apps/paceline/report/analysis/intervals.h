#pragma once

#include <vector>

namespace paceline::report {

// An interval of time, in microseconds.
struct Interval {
  double begin = 0;
  double end = 0;
  double length() const { return end > begin ? end - begin : 0; }
};

// A set of times: intervals in ascending order that do not touch.
using Intervals = std::vector<Interval>;

Intervals united(std::vector<Interval> stretches);
Intervals common(const Intervals& a, const Intervals& b);
Intervals without(const Intervals& a, const Intervals& b);
double length(const Intervals& set);
// The length of the part of `set` within `window`.
double length_in(const Intervals& set, Interval window);

}  // namespace paceline::report
