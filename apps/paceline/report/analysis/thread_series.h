#pragma once

#include "report/analysis/intervals.h"
#include "report/timelines/reader.h"

namespace paceline::report {

// What the kernel counted for the training thread within an interval; times in microseconds.
struct ThreadTimes {
  double cpu = 0;
  double queued = 0;     // ready to run without a core
  double preempted = 0;  // involuntary context switches, also sched_yield's
  double faults = 0;     // page faults that read from a disk
};

// The samples of one rank. Between two samples, figures grow evenly.
class ThreadSeries {
 public:
  ThreadSeries(const std::vector<ThreadUse>& samples, Clock::time_point origin);
  // Whether the kernel reports them.
  bool known() const { return known_; }
  // Whether a sample lies within, or a millisecond before or after; of shorter steps not all are
  // sampled.
  bool covers(Interval interval) const;
  // `interval` is in microseconds since the origin.
  ThreadTimes within(Interval interval) const;

 private:
  double until(double moment, std::int64_t ThreadUse::*figure) const;

  const std::vector<ThreadUse>& samples_;
  std::vector<double> moments_;
  bool known_ = false;
};

}  // namespace paceline::report
