#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "report/timelines/reader.h"
#include "top/live_reader.h"

namespace paceline::top {

// The last steps of one rank, out of what it records.
class RankWindow {
 public:
  void add(const LiveRecords& records, const std::optional<trace::CpuUse>& cpu);
  // Forgets steps that ended before `moment`, of any model, so that whole ones are left, at least
  // `fewest` and at most `most`.
  void keep_since(Clock::time_point moment, std::size_t fewest, std::size_t most);

  struct Rate {
    double steps = 0;  // a second
    double samples;    // the same; NaN if they are not known
  };
  // Of a model; empty with fewer than two steps.
  std::optional<Rate> rate(std::uint64_t model) const;
  // Of the last step: its number, and when it ended.
  const trace::Span* last_step() const { return steps_.empty() ? nullptr : &steps_.back().span; }
  // Whether it has spans of a bucket that is not described.
  bool lacks_buckets() const;
  // Its spans and samples, without what does not come from records.
  report::RankTrace trace() const;
  std::uint64_t invalid() const { return invalid_; }

 private:
  void forget_until(Clock::time_point moment);
  std::optional<Clock::time_point> end_of_step(std::size_t after) const;

  std::deque<trace::Span> spans_;
  std::deque<LiveSpan> steps_;  // of kind step, of the same time
  std::deque<trace::ThreadUse> thread_;
  std::deque<trace::CpuUse> cpu_;
  std::map<report::BucketKey, report::BucketInfo> buckets_;
  std::map<std::uint64_t, std::vector<int>> groups_;
  std::uint64_t invalid_ = 0;
};

}  // namespace paceline::top
