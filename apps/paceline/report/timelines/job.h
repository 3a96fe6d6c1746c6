#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "report/timelines/reader.h"

namespace paceline::report {

// The timelines of one job that share a clock.
struct Job {
  int size = 0;                  // its ranks
  int elsewhere = 0;             // how many of them are known to be on other machines
  std::vector<RankTrace> ranks;  // ranks that have a timeline, in ascending order; at least one
  std::vector<std::string> notes;
};

// Keeps the traces of the job that was started last; there must be at least one trace. The notes
// say which are left out, missing or incomplete.
Job merge(std::vector<RankTrace> traces);

// Reads all rank*.json of a directory. Files that cannot be read are noted; if none can, the first
// one's Error is thrown. Throws UsageError if there is no such file.
Job read_job(const std::filesystem::path& directory);

}  // namespace paceline::report
