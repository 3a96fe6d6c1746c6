#include "report/analysis/diagnosis.h"

#include <algorithm>

#include "report/analysis/explanation.h"

namespace paceline::report {
namespace {

// Shares of the time from which something counts as the bottleneck. Below a tenth it would hardly
// be felt; the optimizer alone, between steps, may well take a fifth.
constexpr double kNotable = 0.10;
constexpr double kNotableBetween = 0.25;
// The part of the stall that one rank must cause to be called slow. Of two equal ranks, each is
// last in half of the steps.
constexpr double kOneRank = 0.75;
// Waking a rank takes tens of microseconds, several times a step: in steps shorter than this, ranks
// that wait for a fifth of the time pay for synchronising at all.
constexpr double kShortStep = 500;
constexpr double kNotableSynchronisation = 0.20;

double median_of_others(const Analysis& a, int rank, double RankTimes::*what) {
  std::vector<double> values;
  for (const RankTimes& one : a.ranks) {
    if (one.rank != rank) values.push_back(one.*what);
  }
  return median(std::move(values));
}

LateRank find_late_rank(const Analysis& a) {
  LateRank late;
  const auto cause =
      std::ranges::max_element(a.stall_causes, {}, [](auto& one) { return one.second; });
  if (cause == a.stall_causes.end()) return late;
  late.rank = cause->first;
  late.share = cause->second;
  const auto times = std::ranges::find(a.ranks, late.rank, &RankTimes::rank);
  if (times == a.ranks.end()) return late;
  late.times = &*times;
  late.usual_computing = median_of_others(a, late.rank, &RankTimes::typical_computing);
  late.more_computing = times->typical_computing - late.usual_computing;
  late.later_start =
      times->typical_between - median_of_others(a, late.rank, &RankTimes::typical_between);
  return late;
}

Finding find_bottleneck(const Analysis& a, const LateRank& rank) {
  if (a.steps.size() < kFewestSteps) return Finding::too_few_steps;
  const double late = a.stall >= kNotable ? a.stall : 0;
  const double communication = a.communication >= kNotable ? a.communication : 0;
  const double between = a.between >= kNotableBetween ? a.between : 0;
  const double pauses = a.pause_share >= kNotableBetween ? a.pause_share : 0;
  const double most = std::max({late, communication, between, pauses});
  const bool one_rank = rank.share >= kOneRank && rank.rank >= 0 && most == late;
  const bool crowded = a.cores > 0 && a.local_size > a.cores;
  const bool other_cause = most > 0 && (most == pauses || most == between || one_rank);
  if (a.queued >= kNotableQueue && !crowded && !other_cause) return Finding::shared_cores;
  if (most == 0) return Finding::all_well;
  if (most == pauses) return Finding::pauses;
  if (most == between) return Finding::between_steps;
  if (one_rank) {
    return rank.more_computing >= rank.later_start ? Finding::straggler : Finding::late_starter;
  }
  if (crowded) return Finding::too_many_ranks;
  if (a.period < kShortStep && a.late + a.communication >= kNotableSynchronisation) {
    return Finding::short_steps;
  }
  return most == late ? Finding::uneven_load : Finding::communication;
}

}  // namespace

Diagnosis diagnose(const Analysis& analysis) {
  const LateRank late = find_late_rank(analysis);
  return explain(find_bottleneck(analysis, late), analysis, late);
}

}  // namespace paceline::report
