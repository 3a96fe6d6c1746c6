#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "top/watched_job.h"

namespace paceline::top {

struct View {
  std::string job;  // how it is called
  report::Job recent;
  report::Analysis analysis{};
  report::Diagnosis diagnosis{};
  std::vector<RankRate> rates{};  // as in recent.ranks
  double idle = 0;                // seconds since a step ended
};

// The judgement as lines: the job, the ranks, the finding. Lines are cut to `columns` characters,
// sentences continue on the next line. If there are too many ranks for `rows` lines, the first ones
// are shown, and the one that the finding is about. 0: no limit.
std::vector<std::string> draw(const View& view, std::size_t columns, std::size_t rows);

}  // namespace paceline::top
