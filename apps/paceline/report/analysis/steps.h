#pragma once

#include <cstdint>
#include <vector>

#include "report/analysis/intervals.h"
#include "report/analysis/thread_series.h"
#include "report/timelines/job.h"

namespace paceline::report {

// All times are in microseconds since the first span of the job.

// A wait of a rank, divided at the time when all ranks had published all buckets of the step: until
// then the rank would wait even if communication took no time.
struct Wait {
  Interval when;
  double late = 0;     // until then: a rank was late; the rest is communication
  int late_rank = -1;  // the last to publish all; -1 is unknown
  int bucket = -1;     // of the main model; -1 is none or another model's
};

// From this rank's publishing until it was reduced by all.
struct OpenBucket {
  int number;
  Interval when;
  double published_by_all;
};

// What an accelerator did; only drawn.
struct DeviceWork {
  Kind kind;
  Interval when;
  int bucket;  // -1 is none
};

struct RankStep {
  Interval step;
  Intervals forward;
  Intervals backward;
  std::vector<OpenBucket> buckets;
  std::vector<DeviceWork> device;
  // Until the next step begins, of all models; the rest of the period is spent computing.
  Interval period;
  std::vector<Wait> waits;
  double between = 0;  // in no forward, backward or step
  // Of the step, outside of forwards, backwards and waits, while the thread neither ran nor waited
  // for a core: it counts as time between steps as well. 0 for a model on a device.
  double asleep = 0;
  // Of the period, and of its part after the step.
  ThreadTimes thread;
  ThreadTimes thread_between;

  double late() const;
  double communication() const;
  double all_between() const { return between + asleep; }
  double computing() const { return period.length() - all_between() - late() - communication(); }
};

struct Step {
  std::uint64_t number;
  std::vector<RankStep> ranks;  // as in Job::ranks
  double period() const;        // their mean
  int last_rank() const;        // that the others waited for longest; -1 is none
};

// The steps of the main model, as far as all of Job::ranks have the step and the next one.
struct Run {
  Clock::time_point origin{};
  bool thread_known = false;  // all ranks have samples of most of their steps
  std::vector<Step> steps;
};

Run collect_steps(const Job& job);

}  // namespace paceline::report
