#include "report/analysis/intervals.h"

#include <algorithm>

namespace paceline::report {

Intervals united(std::vector<Interval> stretches) {
  std::ranges::sort(stretches, {}, &Interval::begin);
  Intervals set;
  for (const Interval& next : stretches) {
    if (next.length() == 0) continue;
    if (!set.empty() && next.begin <= set.back().end) {
      set.back().end = std::max(set.back().end, next.end);
    } else {
      set.push_back(next);
    }
  }
  return set;
}

Intervals common(const Intervals& a, const Intervals& b) {
  Intervals set;
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    const Interval both{std::max(i->begin, j->begin), std::min(i->end, j->end)};
    if (both.length() > 0) set.push_back(both);
    if (i->end < j->end) {
      ++i;
    } else {
      ++j;
    }
  }
  return set;
}

Intervals without(const Intervals& a, const Intervals& b) {
  Intervals set;
  auto j = b.begin();
  for (Interval rest : a) {
    while (j != b.end() && j->end <= rest.begin) ++j;
    for (auto k = j; k != b.end() && k->begin < rest.end; ++k) {
      if (k->begin > rest.begin) set.push_back({rest.begin, k->begin});
      rest.begin = k->end;
    }
    if (rest.length() > 0) set.push_back(rest);
  }
  return set;
}

double length(const Intervals& set) {
  double sum = 0;
  for (const Interval& one : set) sum += one.length();
  return sum;
}

double length_in(const Intervals& set, Interval window) {
  const auto first = std::ranges::lower_bound(set, window.begin, {}, &Interval::end);
  double sum = 0;
  for (auto i = first; i != set.end() && i->begin < window.end; ++i) {
    sum += Interval{std::max(i->begin, window.begin), std::min(i->end, window.end)}.length();
  }
  return sum;
}

}  // namespace paceline::report
