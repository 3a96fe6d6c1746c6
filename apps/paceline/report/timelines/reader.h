#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trace/cpu_use.h"
#include "trace/span.h"

namespace paceline::report {

using trace::Clock;
using trace::CpuUse;
using trace::Kind;
using trace::Span;
using trace::ThreadUse;

struct BucketInfo {
  std::uint64_t bytes = 0;
  std::string parameters;
};

// A model's bucket.
using BucketKey = std::pair<std::uint64_t, int>;

// The content of one rank's file. Strings may hold anything.
struct RankTrace {
  std::string path;
  int rank = -1;
  int size = 0;
  int local_size = 0;        // its machine's ranks; 0 if unknown
  int cores = 0;             // that affinity and quota allow; 0 if unknown
  std::set<int> affinity;    // that it may run on; empty if unknown
  std::int64_t started = 0;  // microseconds since 1970
  std::string boot;          // the boot id, which identifies the clock
  std::vector<Span> spans;
  std::vector<Span> device_spans;  // of an accelerator
  std::map<BucketKey, BucketInfo> buckets;
  std::map<std::uint64_t, trace::ReductionCost> reductions;  // by model
  // By model: the ranks that train it together, in ascending order. Models may lack it.
  std::map<std::uint64_t, std::vector<int>> groups;
  // Both in the order of time. Files of earlier versions have none of a thread, and no times of
  // the others.
  std::vector<CpuUse> cpu;
  std::vector<ThreadUse> thread;
  std::uint64_t dropped = 0;  // spans that found the buffer full
  bool full = false;          // the file reached its size limit
  bool truncated = false;     // the array has no end
  std::uint64_t foreign = 0;  // events that are not Paceline's, or invalid
};

// Throws CorruptFile, naming `path` and the byte, unless `text` is a JSON array of events with one
// that names the rank. The array's end may be missing: it is read up to the last complete event.
RankTrace parse_timeline(std::string_view text, const std::string& path);

// The same for a file on disk. Throws Error if it cannot be read.
RankTrace read_timeline(const std::filesystem::path& path);

}  // namespace paceline::report
