#include "report/analysis/analysis.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "report/analysis/replay.h"

namespace paceline::report {
namespace {

// Buckets are rebuilt after the first step, and memory is touched for the first time.
constexpr std::size_t kWarmUp = 5;
// A rank that is between steps for this many median periods makes a pause: evaluation, a
// checkpoint. If that happens in this part of the steps or more, it may as well be a data loader
// that blocks in each step for which no worker is ready, and only longer times are pauses.
constexpr double kPause = 3;
constexpr double kOften = 0.125;
constexpr double kLongPause = 10;
// What a page from a slow SSD or a network disk takes, in microseconds. With more, a loader that
// sleeps would count as one that reads.
constexpr double kSlowRead = 500;

double part(double of, double whole) {
  return whole > 0 ? of / whole : 0;
}

double median_period(const std::vector<Step>& steps) {
  std::vector<double> periods;
  for (const Step& step : steps) periods.push_back(step.period());
  return median(std::move(periods));
}

bool is_pause(const Step& step, double least) {
  return std::ranges::any_of(step.ranks, [&](const RankStep& rank) {
    return rank.all_between() - rank.thread_between.queued > least;
  });
}

double least_pause(const std::vector<Step>& steps, double usual) {
  const auto pauses = std::ranges::count_if(
      steps, [&](const Step& step) { return is_pause(step, kPause * usual); });
  const bool often = static_cast<double>(pauses) >= kOften * static_cast<double>(steps.size());
  return usual * (often ? kLongPause : kPause);
}

// Adds up the periods of some steps.
struct Periods {
  double sum = 0;
  double count = 0;
  void add(const Step& step) {
    sum += step.period();
    ++count;
  }
};

// Leaves out the warm-up and pauses, and the step after each pause, in which others may wait for
// the rank that made it. What these steps take longer than the others is the pause.
void choose_steps(std::vector<Step> all, Analysis& analysis) {
  analysis.warm_up = std::min(kWarmUp, all.size() / 4);
  all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(analysis.warm_up));
  const double usual = median_period(all);
  const double least = least_pause(all, usual);
  Periods kept;
  Periods left_out;
  bool after_pause = false;
  for (Step& step : all) {
    const bool pause = is_pause(step, least);
    if (pause) ++analysis.pauses;
    (pause || after_pause ? left_out : kept).add(step);
    if (!pause && !after_pause) analysis.steps.push_back(std::move(step));
    after_pause = pause;
  }
  const double without = left_out.count * (kept.count > 0 ? kept.sum / kept.count : usual);
  analysis.mean_period = part(kept.sum, kept.count);
  analysis.pause_share = part(std::max(0.0, left_out.sum - without), kept.sum + left_out.sum);
}

RankTimes times_of(int rank, std::size_t index, const std::vector<Step>& steps) {
  RankTimes times;
  times.rank = rank;
  const double each = part(1, static_cast<double>(steps.size()));
  for (const Step& step : steps) {
    const RankStep& own = step.ranks[index];
    times.computing += each * own.computing();
    times.late += each * own.late();
    times.communication += each * own.communication();
    times.between += each * own.all_between();
    std::vector<Interval> open;
    std::vector<Interval> waits;
    for (const OpenBucket& bucket : own.buckets) open.push_back(bucket.when);
    for (const Wait& wait : own.waits) waits.push_back(wait.when);
    const Intervals under_way = united(std::move(open));
    times.under_way += each * length(under_way);
    times.hidden +=
        each * length(without(common(under_way, own.backward), united(std::move(waits))));
  }
  return times;
}

void add_shares(Analysis& analysis) {
  double whole = 0;
  double under_way = 0;
  double hidden = 0;
  for (const RankTimes& one : analysis.ranks) {
    analysis.computing += one.computing;
    analysis.late += one.late;
    analysis.communication += one.communication;
    analysis.between += one.between;
    whole += one.computing + one.late + one.communication + one.between;
    under_way += one.under_way;
    hidden += one.hidden;
  }
  for (double* const share :
       {&analysis.computing, &analysis.late, &analysis.communication, &analysis.between}) {
    *share = part(*share, whole);
  }
  analysis.overlap = part(hidden, under_way);
}

void add_stalls(const Job& job, Analysis& analysis) {
  double whole = 0;
  double stall = 0;
  for (const Step& step : analysis.steps) {
    whole += step.period();
    const int last = step.last_rank();
    if (last < 0) continue;
    double late = 0;
    double others = 0;
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      if (job.ranks[i].rank == last) continue;
      late += step.ranks[i].late();
      ++others;
    }
    stall += part(late, others);
    analysis.stall_causes[last] += part(late, others);
  }
  analysis.stall = part(stall, whole);
  analysis.stall_per_step = part(stall, static_cast<double>(analysis.steps.size()));
  for (auto& [rank, share] : analysis.stall_causes) share = part(share, stall);
}

void add_buckets(const Job& job, Analysis& analysis) {
  const double each = part(1, static_cast<double>(analysis.steps.size() * job.ranks.size()));
  std::map<int, BucketTimes> buckets;
  for (const Step& step : analysis.steps) {
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      for (const OpenBucket& bucket : step.ranks[i].buckets) {
        buckets[bucket.number].under_way += each * bucket.when.length();
      }
      for (const Wait& wait : step.ranks[i].waits) {
        if (wait.late > 0) analysis.waits[{job.ranks[i].rank, wait.late_rank}] += wait.late;
        if (wait.bucket < 0) continue;
        buckets[wait.bucket].late += each * wait.late;
        buckets[wait.bucket].communication += each * (wait.when.length() - wait.late);
      }
    }
  }
  for (auto& [pair, time] : analysis.waits) {
    time = part(time, static_cast<double>(analysis.steps.size()));
  }
  for (auto& [number, times] : buckets) {
    times.number = number;
    for (const RankTrace& trace : job.ranks) {
      const auto info = trace.buckets.find({analysis.model, number});
      if (info != trace.buckets.end()) times.info = info->second;
    }
    analysis.buckets.push_back(std::move(times));
  }
}

void add_reduction_cost(const Job& job, Analysis& analysis) {
  for (const RankTrace& trace : job.ranks) {
    const auto found = trace.reductions.find(analysis.model);
    if (found == trace.reductions.end() || found->second.rate == 0) continue;
    const trace::ReductionCost& cost = found->second;
    if (!analysis.reduction) analysis.reduction = cost;
    analysis.reduction->latency = std::min(analysis.reduction->latency, cost.latency);
    analysis.reduction->rate = std::max(analysis.reduction->rate, cost.rate);
  }
}

// With a quota a rank may use fewer cores than it may run on; the ranks of a machine mostly share
// the quota.
void count_cores(const Job& job, Analysis& analysis) {
  std::set<int> all;
  int most = 0;
  bool limited = true;
  for (const RankTrace* const trace : all_traces(job)) {
    all.insert(trace->affinity.begin(), trace->affinity.end());
    most = std::max(most, trace->cores);
    limited = limited && trace->cores < std::ssize(trace->affinity);
    analysis.local_size = std::max(analysis.local_size, trace->local_size);
  }
  analysis.cores = all.empty() || limited ? most : static_cast<int>(all.size());
  if (analysis.local_size == 0) analysis.local_size = job.size - job.elsewhere;
}

// In the steps, or in the whole run if no more is known.
void add_queued(const RankTrace& trace, std::size_t index, Analysis& analysis) {
  ThreadTimes sum;
  double all = 0;
  for (const Step& step : analysis.steps) {
    sum.cpu += step.ranks[index].thread.cpu;
    sum.queued += step.ranks[index].thread.queued;
    all += step.ranks[index].period.length();
  }
  if (!analysis.thread_known && trace.cpu.empty()) return;
  if (!analysis.thread_known) {
    sum.cpu = static_cast<double>(trace.cpu.back().running);
    sum.queued = static_cast<double>(trace.cpu.back().queued);
    all = static_cast<double>(trace.cpu.back().wall);
  }
  analysis.ranks[index].queued = part(sum.queued, sum.cpu + sum.queued);
  analysis.ranks[index].queued_of_all = part(sum.queued, all);
}

void add_cpu_use(const Job& job, Clock::time_point origin, Analysis& analysis) {
  double queued = 0;
  double queued_of_all = 0;
  double known = 0;
  for (std::size_t i = 0; i < job.ranks.size(); ++i) {
    add_queued(job.ranks[i], i, analysis);
    if (!analysis.ranks[i].queued) continue;
    queued += *analysis.ranks[i].queued;
    queued_of_all += *analysis.ranks[i].queued_of_all;
    ++known;
  }
  if (known > 0) {
    analysis.queued = queued / known;
    analysis.queued_of_all = queued_of_all / known;
  }
  Interval window;
  if (!analysis.steps.empty()) {
    window = {analysis.steps.front().ranks.front().period.begin,
              analysis.steps.back().ranks.front().period.end};
  }
  analysis.machine = machine_use(job, analysis.local_size, window, origin);
}

// Ranks that are bound to the same cores, more than these.
void find_crowded_ranks(const Job& job, Analysis& analysis) {
  const auto traces = all_traces(job);
  for (const RankTrace* const trace : traces) {
    if (trace->affinity.empty()) continue;
    std::vector<int> within;
    for (const RankTrace* const other : traces) {
      if (!other->affinity.empty() && std::ranges::includes(trace->affinity, other->affinity)) {
        within.push_back(other->rank);
      }
    }
    if (within.size() > trace->affinity.size()) {
      std::ranges::sort(within);
      analysis.crowded = std::move(within);
      return;
    }
  }
}

void add_thread_figures(Analysis& analysis) {
  if (!analysis.thread_known || analysis.steps.empty()) return;
  double waiting = 0;
  double between = 0;
  double within = 0;
  double preempted = 0;
  double faults = 0;
  double reading = 0;
  double all = 0;
  for (const Step& step : analysis.steps) {
    for (const RankStep& rank : step.ranks) {
      preempted += rank.thread.preempted;
      faults += rank.thread.faults;
      between += rank.all_between();
      within += rank.asleep;
      const double asleep =
          std::max(0.0, rank.between - rank.thread_between.cpu - rank.thread_between.queued);
      waiting += asleep + rank.asleep;
      reading += std::min(asleep, kSlowRead * rank.thread_between.faults);
      all += rank.period.length();
    }
  }
  const auto steps = static_cast<double>(analysis.steps.size());
  analysis.preempted = preempted / steps;
  analysis.faults = faults / steps;
  analysis.waiting_between = part(waiting, between);
  analysis.asleep_in_steps = part(within, all);
  analysis.reading_between = part(reading, all);
}

// A rank without a timeline may be the one that all wait for.
void settle(Analysis& analysis) {
  const double stall = analysis.stall_per_step;
  analysis.settled = {analysis.stall, stall, analysis.communication, analysis.between,
                      analysis.stall_causes};
  const bool all = std::ssize(analysis.ranks) == analysis.group_size;
  analysis.replayed = analysis.thread_known && all && !analysis.steps.empty();
  if (!analysis.replayed) return;
  std::vector<int> ranks;
  for (const RankTimes& times : analysis.ranks) ranks.push_back(times.rank);
  const Replay measured(analysis.steps);
  const Replay replay = measured.without_queue();
  const double period = measured.period();
  const Waiting left = replay.waiting(ranks);
  analysis.queue_gain = part(period - replay.period(), period);
  analysis.settled = {part(left.stall, period), left.stall, part(left.communication, period),
                      part(left.between, period), left.stall_causes};
}

std::size_t find_typical(const std::vector<Step>& steps) {
  std::vector<std::size_t> order(steps.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto middle = order.begin() + static_cast<std::ptrdiff_t>(order.size() / 2);
  std::ranges::nth_element(order, middle, {}, [&](std::size_t i) { return steps[i].period(); });
  return middle == order.end() ? 0 : *middle;
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

Analysis analyse(const Job& job) {
  Analysis analysis;
  analysis.size = job.size;
  analysis.group_size = job.group_size;
  Run run = collect_steps(job);
  analysis.thread_known = run.thread_known;
  analysis.model = job.model;
  analysis.models = job.models;
  choose_steps(std::move(run.steps), analysis);
  analysis.typical = find_typical(analysis.steps);
  analysis.period = median_period(analysis.steps);
  for (std::size_t i = 0; i < job.ranks.size(); ++i) {
    analysis.ranks.push_back(times_of(job.ranks[i].rank, i, analysis.steps));
  }
  count_cores(job, analysis);
  find_crowded_ranks(job, analysis);
  add_cpu_use(job, run.origin, analysis);
  add_shares(analysis);
  add_stalls(job, analysis);
  add_thread_figures(analysis);
  settle(analysis);
  add_buckets(job, analysis);
  add_reduction_cost(job, analysis);
  return analysis;
}

}  // namespace paceline::report
