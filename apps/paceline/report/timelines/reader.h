#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
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

struct BucketInfo {
  std::uint64_t bytes = 0;
  std::string parameters;
};

// A model's bucket.
using BucketKey = std::pair<std::uint64_t, int>;

// What one rank's file says. Strings may hold anything.
struct RankTrace {
  std::string path;
  int rank = -1;
  int size = 0;
  int local_size = 0;        // its machine's ranks; 0 if it is not said
  int cores = 0;             // that it may use, of its affinity and quota; 0 if it is not said
  std::set<int> affinity;    // those that it may run on; empty if it is not said
  std::int64_t started = 0;  // microseconds since 1970
  std::string boot;          // whose clock it is
  std::vector<Span> spans;
  std::map<BucketKey, BucketInfo> buckets;
  std::optional<CpuUse> cpu;  // of the whole run
  std::uint64_t lost = 0;     // spans that found the buffer full
  bool full = false;          // the file became as large as it may
  bool truncated = false;     // it ends before its end
  std::uint64_t foreign = 0;  // events that are none of ours, or make no sense
};

// Throws CorruptFile, naming `path` and the byte, unless it is a JSON array of events that tells
// its rank. The array's end may be missing: it counts up to the last whole event.
RankTrace parse_timeline(std::string_view text, const std::string& path);

// The same for a file on disk. Throws Error if it cannot be read.
RankTrace read_timeline(const std::filesystem::path& path);

}  // namespace paceline::report
