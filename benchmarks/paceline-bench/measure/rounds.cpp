#include "measure/rounds.h"

#include <paceline/collectives.h>

#include <algorithm>
#include <span>

#include <paceline/error.h>

#include "measure/clock.h"
#include "measure/gather_records.h"

namespace paceline::bench {
namespace {

// Buckets are rebuilt after the first step and allocators settle within a few.
constexpr int kWarmups = 3;
constexpr int kTrials = 3;
constexpr int kMaxRepeats = 1000;

// The CPU clock covers the backends' own threads; it costs a system call, which stays outside of
// what the wall clock sees.
Sample measure_once(const Contender& contender) {
  if (contender.prepare) contender.prepare();
  barrier();
  const double cpu = now_us(CLOCK_PROCESS_CPUTIME_ID);
  const double wall = now_us(CLOCK_MONOTONIC);
  contender.run();
  const double wall_end = now_us(CLOCK_MONOTONIC);
  const Sample sample{wall_end - wall, now_us(CLOCK_PROCESS_CPUTIME_ID) - cpu};
  // Or a rank that shares its core with another is held up, before it can look at the clock, by
  // what the other prepares next.
  barrier();
  return sample;
}

// The mean of a call over `repeats` runs. One before them, which does not count, fills the caches
// again.
Sample measure_round(const Contender& contender, int repeats, bool fills_caches = true) {
  Sample sum;
  if (contender.elsewhere) {
    sum = contender.elsewhere(repeats * contender.calls);
    barrier();  // our ranks sleep in it, and leave the cores to the others
    return sum;
  }
  if (fills_caches) measure_once(contender);
  for (int i = 0; i < repeats; ++i) {
    const Sample one = measure_once(contender);
    sum.wall_us += one.wall_us;
    sum.cpu_us += one.cpu_us;
  }
  const double calls = static_cast<double>(repeats) * contender.calls;
  return {sum.wall_us / calls, sum.cpu_us / calls};
}

Series combine(const Contender& contender, std::span<const Sample> mine) {
  Series series{contender.implementation, contender.variant, {}, {}};
  series.wall_us.resize(mine.size());
  series.cpu_us.resize(mine.size());
  for (const auto& theirs : gather_records(mine)) {
    for (std::size_t round = 0; round < mine.size(); ++round) {
      series.wall_us[round] = std::max(series.wall_us[round], theirs[round].wall_us);
      series.cpu_us[round] += theirs[round].cpu_us;
    }
  }
  return series;
}

// All ranks have to repeat a run equally often, so they decide together. The fastest run decides:
// any one may meet an interruption many times as long as itself.
int choose_repeats(const Contender& contender, std::chrono::microseconds length) {
  std::vector<Sample> mine;
  for (int i = 0; i < kTrials; ++i) mine.push_back(measure_round(contender, 1));
  const Series trials = combine(contender, mine);
  const double fastest = *std::ranges::min_element(trials.wall_us) * contender.calls;
  const double repeats = static_cast<double>(length.count()) / std::max(fastest, 1e-3);
  return static_cast<int>(std::clamp(repeats, 1.0, static_cast<double>(kMaxRepeats)));
}

}  // namespace

std::vector<Series> measure(const std::vector<Contender>& contenders, const RoundPlan& plan) {
  const std::size_t n = contenders.size();
  // Of all, before any is measured: processes of their own keep the cores busy while they start.
  const bool once = plan.length.count() == 0;
  for (const Contender& contender : contenders) {
    once ? measure_round(contender, 1, false) : measure_round(contender, kWarmups);
  }
  std::vector<int> repeats(n, 1);
  for (std::size_t i = 0; i < n && !once; ++i) {
    repeats[i] = choose_repeats(contenders[i], plan.length);
  }

  std::vector<std::vector<Sample>> samples(n);
  for (std::size_t round = 0; round < static_cast<std::size_t>(plan.rounds); ++round) {
    for (std::size_t turn = 0; turn < n; ++turn) {
      const std::size_t i = (round + turn) % n;
      samples[i].push_back(measure_round(contenders[i], repeats[i], !once));
    }
  }
  std::vector<Series> series(n);
  for (std::size_t i = 0; i < n; ++i) series[i] = combine(contenders[i], samples[i]);
  return series;
}

}  // namespace paceline::bench
