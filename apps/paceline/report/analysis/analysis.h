#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "report/analysis/machine_use.h"
#include "report/analysis/steps.h"
#include "report/timelines/job.h"

namespace paceline::report {

// Where the time of one rank goes, in microseconds a step. The first four add up to the period.
struct RankTimes {
  int rank = 0;
  double computing = 0;
  double late = 0;           // waiting for ranks that had not published yet
  double communication = 0;  // waiting after all had published
  double between = 0;        // in no forward, backward or step, or asleep between these in a step
  double under_way = 0;      // a bucket is published here and not yet reduced by all
  double hidden = 0;         // of that, within backward and not waiting
  // Waiting for a core, of the time in which it could run, and of all time.
  std::optional<double> queued;
  std::optional<double> queued_of_all;
};

struct BucketTimes {
  int number = 0;
  BucketInfo info;
  // Means over ranks, in microseconds a step.
  double under_way = 0;
  double late = 0;  // waits for it, divided as RankTimes divides waits
  double communication = 0;
};

// A summary of the steps of a job. Shares are parts of 1 of the time of all ranks.
struct Analysis {
  int size = 0;        // of the job
  int group_size = 0;  // the ranks that train the model together
  int local_size = 0;  // the ranks on this machine
  int cores = 0;       // that they may use together; 0 if unknown
  std::uint64_t model = 0;
  std::size_t models = 0;

  std::size_t warm_up = 0;  // first steps that are left out
  std::size_t pauses = 0;   // steps after which a rank did something else for long
  double pause_share = 0;   // of the whole time
  std::vector<Step> steps;  // the others
  std::size_t typical = 0;  // the index of the step with the median period

  double period = 0;       // the median
  double mean_period = 0;  // shares are parts of it
  double computing = 0;
  double late = 0;
  double communication = 0;
  double between = 0;
  double overlap = 0;  // the hidden part of communication

  // Waiting for the rank that was last in a step, of the time of the others.
  double stall = 0;
  double stall_per_step = 0;           // in microseconds
  std::map<int, double> stall_causes;  // by the last rank, parts of 1 of the stall
  std::optional<double> queued;        // the mean of the ranks'
  std::optional<double> queued_of_all;
  // Whether all ranks have the kernel's figures of each step. If not, those from `waiting_between`
  // on are empty.
  bool thread_known = false;
  std::optional<double> waiting_between;  // of `between`, neither running nor able to
  // The part of 1 of all ranks' time in which they slept within steps, which is part of `between`.
  std::optional<double> asleep_in_steps;
  std::optional<double> preempted;  // context switches of all ranks a step, sched_yield's too
  std::optional<double> faults;     // page faults that read from a disk, likewise
  // The part of 1 of all ranks' time in which they waited for such pages between steps, at most.
  std::optional<double> reading_between;
  // Whether the steps were replayed without waits for cores, which takes these figures and the
  // timelines of all ranks. If not, `queue_gain` is empty, and `settled` is what was measured.
  bool replayed = false;
  std::optional<double>
      queue_gain;  // the time that steps would save if no thread waited for a core
  // What is left of waiting if no training thread ever waits for a core, as parts of the measured
  // time.
  struct Settled {
    double stall = 0;
    double stall_per_step = 0;  // in microseconds
    double communication = 0;
    double between = 0;
    std::map<int, double> stall_causes;
  } settled;
  MachineUse machine;
  std::vector<int> crowded;          // ranks that may only use fewer cores than they are, bound so
  std::vector<RankTimes> ranks;      // as in Job::ranks
  std::vector<BucketTimes> buckets;  // in ascending order
  // As measured before the first step: the least latency and the highest rate of any rank, since
  // slower ones contain waits for others.
  std::optional<trace::ReductionCost> reduction;
  // Who waited for which late rank, in microseconds a step.
  std::map<std::pair<int, int>, double> waits;
};

Analysis analyse(const Job& job);

double median(std::vector<double> values);  // 0 if there are none

}  // namespace paceline::report
