#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "report/timelines/reader.h"

namespace paceline::report {

// The timelines of one job that share a clock. Its main model is the one that takes most time.
struct Job {
  int size = 0;       // its ranks
  int elsewhere = 0;  // how many of them are known to be on other machines
  // The ranks that train the main model together and have a timeline, in ascending order; at least
  // one.
  std::vector<RankTrace> ranks;
  std::vector<RankTrace> others;  // the rest that have a timeline
  int group_size = 0;             // ranks that train the main model together
  std::uint64_t model = 0;
  std::size_t models = 0;
  std::vector<std::string> notes;
};

// The ranks that train the model together with this one, in ascending order; empty if not known.
std::vector<int> group_of(const RankTrace& trace, std::uint64_t model);

// `ranks` and `others`.
std::vector<const RankTrace*> all_traces(const Job& job);

// Finds the main model, and moves the ranks that do not train it together to `others`, which is
// noted. If several groups train it, each with a copy of its own, the group stays whose ranks wait
// longest on average. A rank whose group is not known trains with all ranks.
void choose_group(Job& job);

// Keeps the traces of the job that was started last; there must be at least one trace. The notes
// say which are left out, missing or incomplete.
Job merge(std::vector<RankTrace> traces);

// Reads all rank*.json of a directory. Files that cannot be read are noted; if none can, the first
// one's Error is thrown. Throws UsageError if there is no such file.
Job read_job(const std::filesystem::path& directory);

}  // namespace paceline::report
