#include <gmock/gmock.h>

#include <utility>
#include <vector>

#include "apps/report/diagnosis_of.h"
#include "support/made_timelines.h"

namespace paceline::report {
namespace {

using test::MadeJob;
using test::make_timelines;
using ::testing::Contains;
using ::testing::HasSubstr;

// A rank's loader delivers late in each other step, after 8 ms of sleep; without that, steps take
// 2 ms. The ranks compute alike.
TEST(Diagnosis, LoadersThatTakeTurnsAreNoUnevenLoad) {
  MadeJob job{.computing = [](int, int) { return 2000.0; },
              .between = [](int rank, int step) { return step % 2 == rank ? 8000.0 : 0.0; },
              .queued = never};
  const Diagnosis diagnosis = diagnosis_of(job);
  EXPECT_EQ(diagnosis.finding, Finding::between_steps);
  // What comes before the first of the 34 steps is not known.
  EXPECT_NEAR(prediction_of(diagnosis).before, 10000, 1);
  EXPECT_NEAR(prediction_of(diagnosis).after, 2000, 8000.0 / 34 + 1);
  // Nor too many ranks, as none of them waits for a core.
  job.ranks = 4;
  job.between = [](int rank, int step) { return step % 4 == rank ? 8000.0 : 0.0; };
  auto traces = make_timelines(job);
  for (RankTrace& trace : traces) trace.cores = 2;
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::between_steps);
  // What they compute takes turns.
  std::swap(job.computing, job.between);
  traces = make_timelines(job);
  for (RankTrace& trace : traces) trace.cores = 2;
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::uneven_load);
}

// Rank 0 sleeps 9 ms before five of six steps, rank 1 3 ms; before the sixth, rank 1 sleeps 9 ms.
// Rank 0 causes 30 of 39 ms for which the other waits. If it slept as long as rank 1, steps would
// take 6 ms instead of 11; if none slept, 2 ms.
TEST(Diagnosis, ARankIsNoLateStarterIfOthersSleepAsWell) {
  const auto between = [](int rank, int step) {
    if (step % 6 == 0) return rank == 0 ? 0.0 : 9000.0;
    return rank == 0 ? 9000.0 : 3000.0;
  };
  const MadeJob job{.steps = 42,
                    .computing = [](int, int) { return 2000.0; },
                    .between = between,
                    .queued = never};
  const Diagnosis diagnosis = diagnosis_of(job);
  EXPECT_EQ(diagnosis.finding, Finding::between_steps);
  EXPECT_THAT(diagnosis.why,
              Contains(HasSubstr("Rank 0 causes 77 % of the time for which others wait")));
  EXPECT_NEAR(prediction_of(diagnosis).before, 11000, 1);
  EXPECT_NEAR(prediction_of(diagnosis).after, 2000, 9000.0 / 36);
  // The others sleep 1.5 of 10.5 ms, and rank 0 for 5 ms more.
  const MadeJob late{.computing = [](int, int) { return 4000.0; },
                     .between = [](int rank, int) { return rank == 0 ? 6500.0 : 1500.0; },
                     .queued = never};
  EXPECT_EQ(diagnosis_of(late).finding, Finding::late_starter);
  EXPECT_NEAR(prediction_of(diagnosis_of(late)).after, 5500, 1);
}

// Steps of 9 ms, of which the first 2 are in no forward: the thread sleeps, or computes.
std::vector<RankTrace> make_late_forwards(std::int64_t cpu) {
  auto traces = make_timelines({.queued = never});
  for (RankTrace& trace : traces) {
    for (Span& span : trace.spans) {
      if (span.kind == Kind::forward) span.begin += std::chrono::milliseconds(2);
    }
    for (std::size_t i = 0; i < trace.thread.size(); ++i) {
      trace.thread[i].cpu = cpu * static_cast<std::int64_t>((i + 1) / 2);
    }
  }
  return traces;
}

TEST(Analysis, SleepOutsideOfForwardsIsTimeBetween) {
  const Analysis asleep = analyse(merge(make_late_forwards(7000)));
  EXPECT_NEAR(asleep.between, 2.0 / 9, 1e-3);
  EXPECT_NEAR(asleep.computing, 7.0 / 9, 1e-3);
  EXPECT_NEAR(asleep.asleep_in_steps.value(), 2.0 / 9, 1e-3);
  EXPECT_NEAR(asleep.waiting_between.value(), 1, 1e-3);
  const Analysis computing = analyse(merge(make_late_forwards(9000)));
  EXPECT_NEAR(computing.between, 0, 1e-3);
  EXPECT_NEAR(computing.computing, 1, 1e-3);
  // A model on a device, whose backward sleeps.
  auto traces = make_late_forwards(7000);
  for (RankTrace& trace : traces) trace.device_spans = {trace.spans.front()};
  EXPECT_NEAR(analyse(merge(traces)).between, 0, 1e-3);
  // A forward may sleep as well, but no more than 2 ms are outside of it.
  EXPECT_NEAR(analyse(merge(make_late_forwards(4000))).between, 2.0 / 9, 1e-3);
}

// 4 ms of sleep before a forward of 1 ms and a backward of 6.
TEST(Diagnosis, SleepWithinStepsIsNotComputing) {
  auto traces = make_timelines({.computing = [](int, int) { return 12e3; }, .queued = never});
  for (RankTrace& trace : traces) {
    for (Span& span : trace.spans) {
      if (span.kind == Kind::forward) span.begin += std::chrono::milliseconds(4);
    }
    for (std::size_t i = 0; i < trace.thread.size(); ++i) {
      trace.thread[i].cpu = 8000 * static_cast<std::int64_t>((i + 1) / 2);
    }
  }
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::between_steps);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("33 % of the time passes between steps"));
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("4.00 ms a step is sleep within steps")));
  EXPECT_NEAR(prediction_of(diagnosis).before, 12e3, 1);
  EXPECT_NEAR(prediction_of(diagnosis).after, 8e3, 1);
}

}  // namespace
}  // namespace paceline::report
