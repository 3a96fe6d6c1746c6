#include "report/analysis/steps.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

namespace paceline::report {
namespace {

// Samples of a thread are no closer, in microseconds: sleep within shorter steps is not known.
constexpr double kShortestSampled = 1000;

// When the ranks published a bucket, or reached the collective calls before a forward.
struct Publication {
  double last = -1;
  int last_rank = -1;
  int latest_seen = -1;
  int ranks = 0;

  void add(int rank, double moment) {
    if (rank != latest_seen) ++ranks;
    latest_seen = rank;
    if (moment <= last) return;
    last = moment;
    last_rank = rank;
  }
};

class Collection {
 public:
  explicit Collection(const Job& job) : job_(job) {
    const auto traces = all_traces(job);
    for (const RankTrace* const trace : traces) {
      for (const Span& span : trace->spans) origin_ = std::min(origin_, span.begin);
    }
    for (const RankTrace* const trace : traces) {
      traced_.insert(trace->rank);
      number_groups(*trace);
    }
    for (const RankTrace* const trace : traces) note_publications(*trace);
  }

  Run run() const {
    Run run{.origin = origin_, .steps = {}};
    run.thread_known = true;
    std::vector<std::vector<RankStep>> by_rank;
    const auto numbers = common_steps();
    for (const RankTrace& trace : job_.ranks) {
      by_rank.push_back(steps_of(trace, numbers));
      run.thread_known = run.thread_known && has_samples(trace, by_rank.back());
    }
    for (std::size_t i = 0; i + 1 < numbers.size(); ++i) {
      if (numbers[i + 1] != numbers[i] + 1) continue;
      Step& step = run.steps.emplace_back(Step{numbers[i], {}});
      for (auto& ranks : by_rank) step.ranks.push_back(std::move(ranks[i]));
    }
    return run;
  }

 private:
  // Group, model, step, and bucket; kLast is the last one of the step, and below that are its
  // syncs.
  using Key = std::tuple<int, std::uint64_t, std::uint64_t, int>;
  static constexpr int kLast = -1;
  static constexpr int kAllRanks = -1;

  // Of the spans of one rank, which come in the order of their ends.
  class Keys {
   public:
    Keys(const RankTrace& trace, const std::map<std::vector<int>, int>& numbers) {
      for (const auto& [model, ranks] : trace.groups) {
        const auto number = numbers.find(group_of(trace, model));
        if (number != numbers.end()) groups_[model] = number->second;
      }
    }

    Key of(const Span& span, int bucket) const {
      const auto group = groups_.find(span.model);
      return {group == groups_.end() ? kAllRanks : group->second, span.model, span.step, bucket};
    }
    Key next_sync(const Span& span) { return of(span, kLast - ++syncs_[{span.model, span.step}]); }

   private:
    std::map<std::uint64_t, int> groups_;
    std::map<std::pair<std::uint64_t, std::uint64_t>, int> syncs_;
  };

  void number_groups(const RankTrace& trace) {
    for (const auto& [model, ranks] : trace.groups) {
      std::vector<int> group = group_of(trace, model);
      if (group.empty()) continue;
      const auto size = static_cast<int>(group.size());
      const bool is_new = groups_.emplace(std::move(group), std::ssize(group_sizes_)).second;
      if (is_new) group_sizes_.push_back(size);
    }
  }

  Interval interval_of(const Span& span) const {
    const auto since = [&](Clock::time_point moment) {
      return std::chrono::duration<double, std::micro>(moment - origin_).count();
    };
    return {since(span.begin), since(span.end)};
  }

  void note_publications(const RankTrace& trace) {
    Keys keys(trace, groups_);
    for (const Span& span : trace.spans) {
      const double begin = interval_of(span).begin;
      if (span.kind == Kind::pre_forward_sync) {
        published_[keys.next_sync(span)].add(trace.rank, begin);
      }
      if (span.kind != Kind::bucket) continue;
      for (const int bucket : {span.bucket, kLast}) {
        published_[keys.of(span, bucket)].add(trace.rank, begin);
      }
    }
  }

  std::vector<std::uint64_t> common_steps() const {
    std::map<std::uint64_t, Publication> seen;
    for (const RankTrace& trace : job_.ranks) {
      for (const Span& span : trace.spans) {
        if (span.kind == Kind::step && span.model == job_.model) seen[span.step].add(trace.rank, 0);
      }
    }
    std::vector<std::uint64_t> numbers;
    for (const auto& [number, step] : seen) {
      if (step.ranks == std::ssize(job_.ranks)) numbers.push_back(number);
    }
    return numbers;
  }

  // One for each of `numbers`; periods end where the next begins.
  std::vector<RankStep> steps_of(const RankTrace& trace,
                                 const std::vector<std::uint64_t>& numbers) const {
    std::vector<RankStep> steps(numbers.size());
    const auto find = [&](std::uint64_t number) -> RankStep* {
      const auto found = std::ranges::lower_bound(numbers, number);
      return found == numbers.end() || *found != number
                 ? nullptr
                 : &steps[static_cast<std::size_t>(found - numbers.begin())];
    };
    const Keys keys(trace, groups_);
    std::vector<Interval> busy;
    std::vector<Interval> named;
    for (const Span& span : trace.spans) {
      if (span.kind != Kind::wait && span.kind != Kind::bucket) busy.push_back(interval_of(span));
      if (span.kind != Kind::step && span.kind != Kind::bucket) named.push_back(interval_of(span));
      if (span.model != job_.model || span.kind == Kind::wait) continue;
      if (RankStep* const step = find(span.step)) add(*step, span, keys);
    }
    for (const Span& span : trace.device_spans) {
      RankStep* const step = span.model == job_.model ? find(span.step) : nullptr;
      if (step != nullptr) step->device.push_back({span.kind, interval_of(span), span.bucket});
    }
    const Intervals all_busy = united(std::move(busy));
    const Intervals all_named = united(std::move(named));
    const ThreadSeries thread(trace.thread, origin_);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      RankStep& step = steps[i];
      step.forward = united(std::move(step.forward));
      step.backward = united(std::move(step.backward));
      const double next = i + 1 < steps.size() ? steps[i + 1].step.begin : step.step.end;
      step.period = {step.step.begin, std::max(next, step.step.end)};
      step.between = step.period.length() - length_in(all_busy, step.period);
      step.thread = thread.within(step.period);
      step.thread_between = thread.within({step.step.end, step.period.end});
    }
    add_waits(trace, steps);
    // The autograd engine runs backwards of a device in a thread of its own, also those under
    // no_sync, which have no spans; the thread that trains sleeps meanwhile.
    if (thread.known() && trace.device_spans.empty()) add_sleep(all_named, thread, steps);
    return steps;
  }

  // The thread may sleep in waits, all the time; other sleep is outside of the spans as far as
  // there is time outside of them.
  static void add_sleep(const Intervals& named, const ThreadSeries& thread,
                        std::vector<RankStep>& steps) {
    for (RankStep& step : steps) {
      const double all = step.step.length();
      if (all < kShortestSampled || !thread.covers(step.step)) continue;
      const ThreadTimes awake = thread.within(step.step);
      const double asleep = all - awake.cpu - awake.queued - step.late() - step.communication();
      step.asleep = std::clamp(asleep, 0.0, all - length_in(named, step.step));
    }
  }

  // Of most steps.
  bool has_samples(const RankTrace& trace, const std::vector<RankStep>& steps) const {
    const ThreadSeries thread(trace.thread, origin_);
    const auto sampled = std::ranges::count_if(
        steps, [&](const RankStep& step) { return thread.covers(step.step); });
    return thread.known() && 2 * sampled >= std::ssize(steps);
  }

  void add(RankStep& step, const Span& span, const Keys& keys) const {
    const Interval when = interval_of(span);
    if (span.kind == Kind::step) step.step = when;
    if (span.kind == Kind::forward) step.forward.push_back(when);
    if (span.kind == Kind::backward) step.backward.push_back(when);
    if (span.kind != Kind::bucket) return;
    const auto& published = published_.at(keys.of(span, span.bucket));
    step.buckets.push_back({span.bucket, when, std::min(published.last, when.end)});
  }

  void add_waits(const RankTrace& trace, std::vector<RankStep>& steps) const {
    Keys keys(trace, groups_);
    for (const Span& span : trace.spans) {
      if (span.kind != Kind::wait && span.kind != Kind::pre_forward_sync) continue;
      const Key others =
          span.kind == Kind::pre_forward_sync ? keys.next_sync(span) : keys.of(span, kLast);
      const Wait wait = wait_of(trace.rank, span, others);
      auto after = std::ranges::upper_bound(steps, wait.when.begin, {},
                                            [](const RankStep& step) { return step.period.begin; });
      if (after == steps.begin()) continue;
      RankStep& step = *--after;
      if (wait.when.end <= step.period.end) step.waits.push_back(wait);
    }
  }

  // Until all had come to `others`, it was for a late rank.
  Wait wait_of(int rank, const Span& span, const Key& others) const {
    Wait wait{.when = interval_of(span)};
    if (span.model == job_.model) wait.bucket = span.bucket;
    const auto found = published_.find(others);
    const int group = std::get<0>(others);
    const int size = group == kAllRanks ? job_.size : group_sizes_[static_cast<std::size_t>(group)];
    const bool all_known = found != published_.end() && found->second.ranks == size;
    if (all_known || (found != published_.end() && traced_.contains(span.peer))) {
      wait.late_rank = found->second.last_rank;
      wait.late = std::clamp(found->second.last - wait.when.begin, 0.0, wait.when.length());
    } else {
      // The rank that it waited for has no timeline.
      wait.late_rank = span.peer;
      wait.late = span.peer >= 0 ? wait.when.length() : 0;
    }
    if (wait.late_rank == rank) wait.late = 0;
    return wait;
  }

  const Job& job_;
  Clock::time_point origin_ = Clock::time_point::max();
  std::set<int> traced_;                    // the ranks with timelines
  std::map<std::vector<int>, int> groups_;  // their numbers
  std::vector<int> group_sizes_;
  std::map<Key, Publication> published_;
};

}  // namespace

double RankStep::late() const {
  double sum = 0;
  for (const Wait& wait : waits) sum += wait.late;
  return sum;
}

double RankStep::communication() const {
  double sum = 0;
  for (const Wait& wait : waits) sum += wait.when.length() - wait.late;
  return sum;
}

double Step::period() const {
  double sum = 0;
  for (const RankStep& rank : ranks) sum += rank.period.length();
  return sum / static_cast<double>(ranks.size());
}

int Step::last_rank() const {
  std::map<int, double> blame;
  for (const RankStep& rank : ranks) {
    for (const Wait& wait : rank.waits) blame[wait.late_rank] += wait.late;
  }
  const auto last = std::ranges::max_element(blame, {}, [](auto& entry) { return entry.second; });
  return last == blame.end() || last->second == 0 ? -1 : last->first;
}

Run collect_steps(const Job& job) {
  return Collection(job).run();
}

}  // namespace paceline::report
