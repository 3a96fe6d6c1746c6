#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "report/timelines/reader.h"
#include "trace/live_memory.h"
#include "trace/node.h"

namespace paceline::top {

using trace::Clock;

// A bound for what a rank may make this process keep: of so many models it knows the groups.
inline constexpr std::size_t kMaxGroups = 256;

struct LiveSpan {
  trace::Span span;
  double samples;  // that the model has trained until then; NaN if it is not known
};

// What a process recorded since the last reading.
struct LiveRecords {
  std::vector<LiveSpan> spans;
  std::vector<trace::ThreadUse> thread;
  std::map<report::BucketKey, report::BucketInfo> buckets;
  std::map<std::uint64_t, std::vector<int>> groups;  // as in RankTrace
  std::uint64_t invalid = 0;                         // records that Paceline does not write
};

// What a process that trains shows of itself (trace/live_memory.h). It may write anything there:
// all that is read is checked.
class LiveReader {
 public:
  // Maps the memory of `fd`. Throws Error if it is no such memory, or that of another version.
  explicit LiveReader(int fd);
  LiveReader(const LiveReader&) = delete;
  LiveReader& operator=(const LiveReader&) = delete;
  ~LiveReader();

  struct Place {
    int rank;
    int size;
    trace::Node node;
  };
  // Of its world; empty if it makes no sense.
  std::optional<Place> place() const;
  pid_t process() const;
  // How the launcher calls the job; at most kLongestJob bytes of that.
  std::string job() const;
  // Of its world; 0 if not known.
  std::uint64_t identity() const;
  int port() const;

  // Has the process record until then at least. It stops by itself.
  void watch_until(Clock::time_point until);
  LiveRecords read();
  // Records that were overwritten before they were read.
  std::uint64_t lost() const { return spans_->lost(); }
  // The same, of descriptions of buckets.
  std::uint64_t lost_buckets() const { return buckets_->lost(); }

 private:
  trace::LiveMemory* memory_;
  std::optional<trace::RingReader<trace::SpanRing>> spans_;
  std::optional<trace::RingReader<trace::BucketRing>> buckets_;
};

}  // namespace paceline::top
