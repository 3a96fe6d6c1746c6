#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "report/timelines/reader.h"

namespace paceline::test {

// A synthetic job; times are in microseconds. A rank spends a third of its computing in forward. In
// backward it publishes its buckets at equal intervals, the last one at the end. Buckets are
// reduced one after the other, each once all ranks have published it.
struct MadeJob {
  using Time = std::function<double(int rank, int step)>;

  int ranks = 2;
  int steps = 40;
  int buckets = 4;
  std::uint64_t bytes = std::uint64_t{1} << 20;  // of a bucket
  Time computing = [](int, int) { return 9000.0; };
  Time between = [](int, int) { return 0.0; };
  // Of computing, the time for which a rank waits for a core. If it is set, so are samples of the
  // threads that train, which wait for data between steps.
  Time queued = nullptr;
  // For how long rank 0 waits for a core in the reduction of the last bucket; part of `queued`'s
  // samples, if there are any.
  std::function<double(int step)> delay = [](int) { return 0.0; };
  double reduction = 0;  // of one bucket, once all ranks have published it
  bool meets = false;    // before a forward, all ranks wait for the last rank
};

std::vector<report::RankTrace> make_timelines(const MadeJob& job);

// rankR.json of each, in the format of PACELINE_TIMELINE.
void write_timelines(const std::filesystem::path& directory,
                     const std::vector<report::RankTrace>& traces);

}  // namespace paceline::test
