#include "top/rank_window.h"

#include <algorithm>
#include <limits>

namespace paceline::top {
namespace {

// A bound for what a rank may make this process keep. It is far above what a window needs.
constexpr std::size_t kMostSpans = std::size_t{1} << 18;
constexpr std::size_t kMostBuckets = trace::BucketRing::kCapacity;

template <typename Records, typename IsOld>
void drop_front(Records& records, IsOld is_old) {
  while (!records.empty() && is_old(records.front())) records.pop_front();
}

template <typename Records>
void bound(Records& records) {
  if (records.size() <= kMostSpans) return;
  records.erase(records.begin(),
                records.begin() + static_cast<std::ptrdiff_t>(records.size() - kMostSpans));
}

}  // namespace

void RankWindow::add(const LiveRecords& records, const std::optional<trace::CpuUse>& cpu) {
  for (const LiveSpan& one : records.spans) {
    spans_.push_back(one.span);
    if (one.span.kind == trace::Kind::step) steps_.push_back(one);
  }
  for (const trace::ThreadUse& use : records.thread) {
    if (thread_.empty() || use.at >= thread_.back().at) thread_.push_back(use);
  }
  if (cpu) cpu_.push_back(*cpu);
  for (const auto& [key, info] : records.buckets) buckets_.insert_or_assign(key, info);
  if (buckets_.size() > kMostBuckets) buckets_.clear();
  for (const auto& [model, ranks] : records.groups) groups_.insert_or_assign(model, ranks);
  while (groups_.size() > kMaxGroups) groups_.erase(groups_.begin());
  invalid_ += records.invalid;
  bound(spans_);
  bound(steps_);
  bound(thread_);
  bound(cpu_);
}

bool RankWindow::lacks_buckets() const {
  return std::ranges::any_of(spans_, [&](const trace::Span& span) {
    return span.kind == trace::Kind::bucket && !buckets_.contains({span.model, span.bucket});
  });
}

void RankWindow::forget_until(Clock::time_point moment) {
  Clock::time_point end = Clock::time_point::min();
  drop_front(steps_, [&](const LiveSpan& step) {
    const bool old = step.span.end <= moment;
    if (old) end = step.span.end;
    return old;
  });
  std::erase_if(spans_, [&](const trace::Span& span) { return span.begin < end; });
  // The last sample before the first step is what its figures begin with.
  while (thread_.size() > 1 && thread_[1].at <= end) thread_.pop_front();
  while (cpu_.size() > 1 && cpu_[1].at <= end) cpu_.pop_front();
}

void RankWindow::keep_since(Clock::time_point moment, std::size_t fewest, std::size_t most) {
  const auto end = end_of_step(fewest);
  if (!end) return;
  moment = std::min(moment, *end);
  forget_until(std::max(moment, end_of_step(most).value_or(moment)));
}

// When the step ended that has `after` steps after it; empty if there are fewer.
std::optional<Clock::time_point> RankWindow::end_of_step(std::size_t after) const {
  if (steps_.size() <= after) return std::nullopt;
  return steps_[steps_.size() - 1 - after].span.end;
}

std::optional<RankWindow::Rate> RankWindow::rate(std::uint64_t model) const {
  const auto is_own = [&](const LiveSpan& step) { return step.span.model == model; };
  const auto first = std::ranges::find_if(steps_, is_own);
  if (first == steps_.end()) return std::nullopt;
  const LiveSpan& last = *std::find_if(steps_.rbegin(), steps_.rend(), is_own);
  if (last.span.end <= first->span.end) return std::nullopt;
  const auto steps = static_cast<double>(std::ranges::count_if(steps_, is_own) - 1);
  const double seconds = std::chrono::duration<double>(last.span.end - first->span.end).count();
  const double samples = last.samples - first->samples;
  return Rate{steps / seconds,
              samples >= 0 ? samples / seconds : std::numeric_limits<double>::quiet_NaN()};
}

report::RankTrace RankWindow::trace() const {
  report::RankTrace trace;
  trace.spans.assign(spans_.begin(), spans_.end());
  trace.thread.assign(thread_.begin(), thread_.end());
  trace.cpu.assign(cpu_.begin(), cpu_.end());
  trace.buckets = buckets_;
  trace.groups = groups_;
  return trace;
}

}  // namespace paceline::top
