#include "report/analysis/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "report/analysis/explanation.h"
#include "report/analysis/replay.h"
#include "report/units.h"

namespace paceline::report {
namespace {

// Shares of the time from which something counts as the bottleneck. Below a tenth it would hardly
// be felt; the optimizer alone, between steps, may well take a fifth.
constexpr double kNotable = 0.10;
constexpr double kNotableBetween = 0.25;
// The part of the stall that one rank must cause to be called slow. Of two equal ranks, each is
// last in half of the steps.
constexpr double kOneRank = 0.75;
// Waking a rank takes tens of microseconds, several times a step: ranks that compute for less than
// this, and wait for a fifth of the time, pay for synchronising at all.
constexpr double kShortStep = 1000;
constexpr double kNotableSynchronisation = 0.20;
// The part of the periods of a CPU limit, mostly 100 ms, in which it stops the job.
constexpr double kThrottled = 0.5;
// What even a slow network needs: for each bucket a round of messages, and 100 MB/s.
constexpr double kSlowMessage = 300;
constexpr double kSlowNetwork = 100;
// What it takes to wake a rank that sleeps, on a machine that is not idle, and how often a step
// waits for that at most: not for each of many buckets, as others follow meanwhile. Ranks that
// measure what a reduction costs do not sleep.
constexpr double kWakeUp = 100;
constexpr std::size_t kMostWakeUps = 4;
// Page faults of a step from which on lack of memory may slow it down.
constexpr double kNotableFaults = 1;
// The memory pressure from which such pages count as dropped. Below it, they are read for the first
// time.
constexpr double kDropsPages = 0.01;

// How many times as much several slow ranks must cost as one of them alone.
constexpr double kOfSeveral = 1.5;
// A remedy that gains less than this part of the time does not explain why ranks wait.
constexpr double kNextToNothing = 0.02;

// By Finding.
constexpr std::array<std::string_view, 16> kNames{
    "too_few_steps", "all_well",    "straggler",     "slow_ranks", "late_starter", "too_many_ranks",
    "same_cores",    "cpu_limit",   "shared_cores",  "memory",     "uneven_load",  "communication",
    "delayed",       "short_steps", "between_steps", "pauses"};

double median_of_others(const Analysis& a, int rank, double RankTimes::*what) {
  std::vector<double> values;
  for (const RankTimes& one : a.ranks) {
    if (one.rank != rank) values.push_back(one.*what);
  }
  return median(std::move(values));
}

Replay replay_without_queue(const Analysis& a) {
  const Replay measured(a.steps);
  return a.replayed ? measured.without_queue() : measured;
}

std::size_t index_of(const Analysis& a, const LateRank& rank) {
  return static_cast<std::size_t>(rank.times - a.ranks.data());
}

// Compares what the steps would save, since only a replay sees in which steps the others waited. If
// that is next to nothing, the others wait for another reason.
bool starts_late(const Analysis& a, std::size_t index) {
  const Replay replay = replay_without_queue(a);
  const double usual = replay.with_usual_between(index).period();
  return usual < replay.with_usual_computing(index).period() &&
         usual < (1 - kNextToNothing) * replay.period();
}

LateRank find_late_rank(const Analysis& a) {
  LateRank late;
  const auto& causes = a.settled.stall_causes;
  const auto cause = std::ranges::max_element(causes, {}, [](auto& one) { return one.second; });
  if (cause == causes.end()) return late;
  late.rank = cause->first;
  late.share = cause->second;
  const auto times = std::ranges::find(a.ranks, late.rank, &RankTimes::rank);
  if (times == a.ranks.end()) return late;
  late.times = &*times;
  late.usual_computing = median_of_others(a, late.rank, &RankTimes::computing);
  late.more_computing = times->computing - late.usual_computing;
  late.later_start = times->between - median_of_others(a, late.rank, &RankTimes::between);
  late.starts_late = late.later_start > 0 && starts_late(a, index_of(a, late));
  return late;
}

// The ranks above the largest gap between the ranks' mean computing, if that is most of their
// spread and these ranks are no majority: else the others are fast, or all differ. Where it changes
// from step to step which rank is late, the means hardly differ.
SlowRanks find_slow_ranks(const Analysis& a) {
  std::vector<double> means;
  for (const RankTimes& one : a.ranks) means.push_back(one.computing);
  std::ranges::sort(means);
  std::size_t usual = 0;  // how many ranks are not slow
  double widest = 0;
  for (std::size_t i = 1; i < means.size(); ++i) {
    const double gap = means[i] - means[i - 1];
    if (gap > widest) {
      widest = gap;
      usual = i;
    }
  }
  SlowRanks slow;
  const bool splits = widest > 0 && 2 * widest >= means.back() - means.front();
  if (!splits || 2 * usual < means.size() || means[usual - 1] <= 0) return slow;
  const auto mean_of = [&](std::size_t begin, std::size_t end) {
    double sum = 0;
    for (std::size_t i = begin; i < end; ++i) sum += means[i];
    return sum / static_cast<double>(end - begin);
  };
  slow.usual_computing = mean_of(0, usual);
  slow.computing = mean_of(usual, means.size());
  for (const RankTimes& one : a.ranks) {
    const bool is_slow = one.computing >= means[usual];
    if (is_slow) slow.ranks.push_back(one.rank);
    slow.parts.push_back(is_slow ? slow.usual_computing / one.computing : 1);
  }
  return slow;
}

// Whether they, and not one of them or uneven batches, hold the others back.
bool are_slow(const Analysis& a, const SlowRanks& slow, const LateRank& rank) {
  if (slow.ranks.size() < 2) return false;
  const Replay replay = replay_without_queue(a);
  const auto gain_of = [&](const Replay& other) { return replay.period() - other.period(); };
  const double gain = gain_of(replay.with_part_of_computing(slow.parts));
  const double of_one =
      rank.times == nullptr ? 0 : gain_of(replay.with_usual_computing(index_of(a, rank)));
  return gain >= kNotable * replay.period() && gain >= kOfSeveral * of_one &&
         gain >= gain_of(replay.with_even_computing());
}

// If the size is not known, what was measured stands: communication.
bool explained_by_size(const Analysis& a) {
  const auto expected = expected_communication(a);
  if (!expected) return true;
  const double wake_ups =
      a.reduction ? kWakeUp * static_cast<double>(std::min(a.buckets.size(), kMostWakeUps)) : 0;
  return 2 * (expected->sum() + wake_ups) >= a.settled.communication * a.mean_period;
}

// Whether ranks wait less to move bytes than to be woken.
bool waits_for_wake_ups(const Analysis& a) {
  const auto expected = expected_communication(a);
  const double waiting = (a.late + a.communication) * a.mean_period;
  return expected && 2 * expected->transfer < waiting;
}

bool is_crowded(const Analysis& a) {
  return !a.crowded.empty() || (a.cores > 0 && a.local_size > a.cores);
}

// Of several ways in which threads wait for cores.
Finding why_queued(const Analysis& a) {
  if (a.machine.throttled.value_or(0) >= kThrottled) return Finding::cpu_limit;
  if (a.cores > 0 && a.local_size > a.cores) return Finding::too_many_ranks;
  return a.crowded.empty() ? Finding::shared_cores : Finding::same_cores;
}

// Shares of the measured time, or 0 if it would hardly be felt.
struct Shares {
  double queue = 0;
  double memory = 0;
  double late = 0;
  double communication = 0;
  double between = 0;
  double pauses = 0;
  double most() const { return std::max({queue, memory, late, communication, between, pauses}); }
};

Shares notable_shares(const Analysis& a) {
  const auto notable = [](double share, double least) { return share >= least ? share : 0; };
  const double pressure = a.machine.memory_pressure.value_or(0);
  const bool reads_back = a.faults.value_or(0) >= kNotableFaults && pressure >= kDropsPages;
  const double reading = a.reading_between.value_or(0);
  const double memory = reads_back ? notable(std::max(pressure, reading), kNotable) : 0;
  return {.queue = notable(a.queue_gain.value_or(0), kNotable),
          .memory = memory,
          .late = notable(a.settled.stall, kNotable),
          .communication = notable(a.settled.communication, kNotable),
          .between = notable(a.settled.between - (memory > 0 ? reading : 0), kNotableBetween),
          .pauses = notable(a.pause_share, kNotableBetween)};
}

// If steps cannot be replayed, long queues are a sign: parts of all time, for a thread that mostly
// sleeps loses little by them.
bool queue_is_a_sign(const Analysis& a) {
  return !a.replayed && a.queued_of_all.value_or(0) >= kNotableQueue && !is_crowded(a);
}

// Whether this rank is known to be late for another reason than its own queue.
bool is_slow_itself(const LateRank& rank) {
  return rank.times != nullptr && rank.times->queued_of_all.value_or(0) < kNotableQueue;
}

// Whether sleep between steps holds all ranks back, whichever is last: if the late rank slept no
// longer than the others, the rest of the sleep would still cost as much, or half of that.
bool all_sleep_between(const Analysis& a, const LateRank& rank) {
  if (!a.replayed || rank.times == nullptr) return false;
  const Replay replay = replay_without_queue(a);
  const double period = replay.period();
  const double usual = replay.with_usual_between(index_of(a, rank)).period();
  const double rest = usual - replay.without_waiting_between().period();
  return rest >= kNotable * period && 2 * rest >= period - usual;
}

// Of ranks that take turns to be late, each for one of several reasons.
Finding why_uneven(const Analysis& a, const Shares& shares) {
  const Replay replay = replay_without_queue(a);
  const double computing = replay.period() - replay.with_even_computing().period();
  const double between = replay.period() - replay.with_even_between().period();
  const bool explained = std::max(computing, between) >= kNextToNothing * replay.period();
  if (!explained && shares.queue > 0) return why_queued(a);
  return between > computing ? Finding::between_steps : Finding::uneven_load;
}

// Whether ranks wait for each other because they wait for cores. If steps cannot be replayed, more
// ranks than cores are reason enough.
bool queue_explains_waits(const Analysis& a, const Shares& shares) {
  const double left = a.settled.stall + a.settled.communication;
  return !a.replayed || shares.queue > 0 || a.stall + a.communication - left >= kNotable;
}

Finding find_bottleneck(const Analysis& a, const LateRank& rank, const SlowRanks& slow) {
  const Shares shares = notable_shares(a);
  if (a.steps.size() < kFewestSteps) {
    const bool paused = shares.pauses > 0 && a.steps.size() + a.pauses >= kFewestSteps;
    return paused ? Finding::pauses : Finding::too_few_steps;
  }
  const double most = shares.most();
  const bool one_rank = rank.share >= kOneRank && rank.rank >= 0 && most == shares.late;
  const bool other_cause =
      most > 0 && (most == shares.pauses || most == shares.between || most == shares.memory ||
                   (one_rank && is_slow_itself(rank)));
  if (queue_is_a_sign(a) && !other_cause) return Finding::shared_cores;
  if (most == 0) return Finding::all_well;
  if (most == shares.memory) return Finding::memory;
  if (most == shares.pauses) return Finding::pauses;
  if (most == shares.between) return Finding::between_steps;
  if (most == shares.queue) return why_queued(a);
  const bool several = most == shares.late && are_slow(a, slow, rank);
  if (one_rank && !several) {
    if (rank.starts_late && all_sleep_between(a, rank)) return Finding::between_steps;
    return rank.starts_late ? Finding::late_starter : Finding::straggler;
  }
  if (is_crowded(a) && queue_explains_waits(a, shares)) return why_queued(a);
  if (several) return Finding::slow_ranks;
  const double waiting = a.late + a.communication;
  if ((1 - waiting) * a.mean_period < kShortStep && waiting >= kNotableSynchronisation &&
      waits_for_wake_ups(a)) {
    return Finding::short_steps;
  }
  if (most == shares.late) return why_uneven(a, shares);
  return explained_by_size(a) ? Finding::communication : Finding::delayed;
}

}  // namespace

Diagnosis diagnose(const Analysis& analysis) {
  const LateRank late = find_late_rank(analysis);
  const SlowRanks slow = find_slow_ranks(analysis);
  return explain(find_bottleneck(analysis, late, slow), analysis, late, slow);
}

std::string_view name_of(Finding finding) {
  return kNames[static_cast<std::size_t>(finding)];
}

std::string text_of(const Prediction& prediction) {
  return fmt::format("If {}: {} -> {} a step.", prediction.if_what, time_text(prediction.before),
                     time_text(prediction.after));
}

std::optional<std::uint64_t> bytes_of_step(const Analysis& analysis) {
  std::uint64_t bytes = 0;
  for (const BucketTimes& one : analysis.buckets) {
    if (one.info.bytes == 0) return std::nullopt;
    bytes += one.info.bytes;
  }
  return analysis.buckets.empty() ? std::nullopt : std::optional(bytes);
}

std::optional<ExpectedCommunication> expected_communication(const Analysis& analysis) {
  const auto bytes = bytes_of_step(analysis);
  if (!bytes) return std::nullopt;
  const auto size = static_cast<double>(*bytes);
  const auto buckets = static_cast<double>(analysis.buckets.size());
  if (const auto& cost = analysis.reduction) {
    return ExpectedCommunication{buckets * cost->latency, size / cost->rate};
  }
  const double sent =
      2.0 * (analysis.group_size - 1) / analysis.group_size;  // of each byte, by each rank
  return ExpectedCommunication{buckets * kSlowMessage, sent * size / kSlowNetwork};
}

}  // namespace paceline::report
