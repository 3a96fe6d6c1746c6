#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "report/analysis/steps.h"
#include "report/timelines/job.h"

namespace paceline::report {

// Where the time of one rank goes, in microseconds a step. The first four add up to the period.
struct RankTimes {
  int rank = 0;
  double computing = 0;
  double late = 0;               // waiting for ranks that had not published yet
  double communication = 0;      // waiting though all had
  double between = 0;            // in no forward, backward or step
  double typical_computing = 0;  // the medians of these
  double typical_between = 0;
  double under_way = 0;  // any bucket published here and not yet reduced by all
  double hidden = 0;     // of that, within backward and not waiting
  // Of the time in which it had something to do, in the whole run: waiting for a core.
  double queued = 0;
};

struct BucketTimes {
  int number = 0;
  BucketInfo info;
  // Means over ranks, in microseconds a step.
  double under_way = 0;
  double late = 0;  // waits for it, divided as those of ranks
  double communication = 0;
};

// What the steps of a job come to. Shares are parts of 1 of the time of all ranks.
struct Analysis {
  int size = 0;
  int local_size = 0;  // of them those on this machine
  int cores = 0;       // that they may use together; 0 if that is not known
  std::uint64_t model = 0;
  std::size_t models = 0;

  std::size_t warm_up = 0;  // first steps that are left out
  std::size_t pauses = 0;   // steps after which a rank did something else for long
  double pause_share = 0;   // of the whole time
  std::vector<Step> steps;  // the others
  std::size_t typical = 0;  // of them the one of median period

  double period = 0;  // the median
  double computing = 0;
  double late = 0;
  double communication = 0;
  double between = 0;
  double overlap = 0;  // the hidden part of communication

  // Of the time of ranks that were not the last of their step: waiting for the one that was.
  double lost = 0;
  double lost_per_step = 0;       // in microseconds
  std::map<int, double> lost_to;  // by the last rank; parts of 1 of what was lost
  double queued = 0;              // the mean of the ranks'
  double used_cores = 0;          // by all ranks, in the mean of the whole run; 0 if not all tell
  std::vector<RankTimes> ranks;   // as in Job::ranks
  std::vector<BucketTimes> buckets;  // in ascending order
  // Who waited for which late rank, in microseconds a step.
  std::map<std::pair<int, int>, double> waits;
};

Analysis analyse(const Job& job);

double median(std::vector<double> values);  // 0 if there are none

}  // namespace paceline::report
