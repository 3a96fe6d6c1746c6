#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "report/timelines/job.h"
#include "top/find_job.h"
#include "top/rank_window.h"
#include "trace/cpu_use.h"

namespace paceline::top {

// What is known of a rank besides what the report says.
struct RankRate {
  int rank;
  std::uint64_t step = 0;  // the last one that ended
  std::optional<RankWindow::Rate> rate;
};

// The ranks of a job on this machine, which record for this process as long as it calls poll.
class WatchedJob {
 public:
  explicit WatchedJob(JobKey key);

  // Call a few times a second: reads what ranks have recorded, and looks for ranks that are
  // missing. Ranks that have ended are left out.
  void poll();
  // Whether no rank of it is left.
  bool has_ended() const { return ranks_.empty(); }

  const JobKey& key() const { return key_; }
  // The steps of the last ten seconds, for the report, but at least 20 and at most 1000.
  report::Job recent() const;
  // Of job.ranks, which `recent` has returned since the last call of `poll`, and its main model.
  std::vector<RankRate> rates(const report::Job& job) const;
  // For how long no rank has ended a step.
  std::chrono::duration<double> idle() const;

 private:
  struct Rank {
    LiveProcess process;
    RankWindow window;
    trace::CpuMeter cpu;
  };

  void find_ranks();
  report::RankTrace trace_of(const Rank& rank) const;
  std::vector<std::string> notes() const;

  JobKey key_;
  std::map<int, Rank> ranks_;
  Clock::time_point next_search_{};
  Clock::time_point next_cpu_{};
  Clock::time_point last_step_end_;
};

}  // namespace paceline::top
