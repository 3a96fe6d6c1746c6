#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "report/timelines/reader.h"

namespace paceline::report {

// The timelines of one job that can be laid over each other.
struct Job {
  int size = 0;                  // its ranks
  int elsewhere = 0;             // of them those that are known to be on other machines
  std::vector<RankTrace> ranks;  // those that are there, in ascending order; at least one
  std::vector<std::string> notes;
};

// Those of `traces`, of which there must be one, that belong to the job that was started last; what
// is left out, missing or cut short stands in the notes.
Job merge(std::vector<RankTrace> traces);

// Of all rank*.json in a directory. A file that cannot be read is noted if another can, else its
// Error is thrown; UsageError if there is none.
Job read_job(const std::filesystem::path& directory);

}  // namespace paceline::report
