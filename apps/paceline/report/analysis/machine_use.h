#pragma once

#include <optional>

#include "report/analysis/intervals.h"
#include "report/timelines/job.h"

namespace paceline::report {

// What the machine did while the job trained. Empty: the kernel does not report it, or a rank that
// counts has no timeline.
struct MachineUse {
  // Cores that the ranks used, on average, without processes that they started.
  std::optional<double> used;
  std::optional<double> foreign;    // cores of the job that processes used that are no ranks
  std::optional<double> elsewhere;  // other cores of the machine that processes used
  std::optional<double> stolen;     // cores of the job that the host took
  // The part of the periods of a CPU limit in which it stopped ranks.
  std::optional<double> throttled;
  std::optional<double> cpu_pressure;  // parts of the time
  std::optional<double> memory_pressure;
};

// `local_size`: the ranks on the machine; `window`: microseconds since `origin`. Files of earlier
// versions have figures of the whole run.
MachineUse machine_use(const Job& job, int local_size, Interval window, Clock::time_point origin);

}  // namespace paceline::report
