#pragma once

#include <optional>

#include "report/analysis/intervals.h"
#include "report/timelines/job.h"

namespace paceline::report {

// What the machine did while the job trained. Empty: the kernel does not report it.
struct MachineUse {
  double used = 0;                  // cores that the ranks used, on average; 0 if unknown
  std::optional<double> foreign;    // cores of the job that other processes used
  std::optional<double> elsewhere;  // other cores of the machine that processes used
  std::optional<double> stolen;     // cores of the job that the host took
  // The part of the periods of a CPU limit in which it stopped ranks.
  std::optional<double> throttled;
  std::optional<double> cpu_pressure;  // parts of the time
  std::optional<double> memory_pressure;
};

// `window`: microseconds since `origin`. Files of earlier versions have figures of the whole run.
MachineUse machine_use(const Job& job, Interval window, Clock::time_point origin);

}  // namespace paceline::report
