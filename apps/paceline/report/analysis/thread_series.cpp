#include "report/analysis/thread_series.h"

#include <algorithm>

namespace paceline::report {
namespace {

constexpr double kBetweenSamples = 1000;

}  // namespace

ThreadSeries::ThreadSeries(const std::vector<ThreadUse>& samples, Clock::time_point origin)
    : samples_(samples) {
  for (const ThreadUse& sample : samples) {
    moments_.push_back(std::chrono::duration<double, std::micro>(sample.at - origin).count());
  }
  known_ = samples.size() >= 2 && std::ranges::all_of(samples, [](const ThreadUse& sample) {
             return sample.queued != trace::kUnknown;
           });
}

bool ThreadSeries::covers(Interval interval) const {
  const auto first = std::ranges::lower_bound(moments_, interval.begin - kBetweenSamples);
  return first != moments_.end() && *first <= interval.end + kBetweenSamples;
}

ThreadTimes ThreadSeries::within(Interval interval) const {
  if (!known_) return {};
  const auto grown = [&](std::int64_t ThreadUse::*figure) {
    return std::max(0.0, until(interval.end, figure) - until(interval.begin, figure));
  };
  return {grown(&ThreadUse::cpu), grown(&ThreadUse::queued), grown(&ThreadUse::preempted),
          grown(&ThreadUse::faults)};
}

double ThreadSeries::until(double moment, std::int64_t ThreadUse::*figure) const {
  const auto value = [&](std::size_t i) { return static_cast<double>(samples_[i].*figure); };
  const auto after =
      static_cast<std::size_t>(std::ranges::upper_bound(moments_, moment) - moments_.begin());
  if (after == 0) return value(0);
  if (after == moments_.size()) return value(after - 1);
  const double part = (moment - moments_[after - 1]) / (moments_[after] - moments_[after - 1]);
  return value(after - 1) + part * (value(after) - value(after - 1));
}

}  // namespace paceline::report
