#include <gmock/gmock.h>

#include <vector>

#include "apps/report/diagnosis_of.h"
#include "report/analysis/intervals.h"
#include "report/analysis/machine_use.h"
#include "report/analysis/thread_series.h"
#include "report/units.h"
#include "support/made_timelines.h"

namespace paceline::report {
namespace {

using test::MadeJob;
using test::make_timelines;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::FieldsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Intervals, UniteIntersectAndSubtract) {
  const Intervals a = united({{4, 6}, {0, 2}, {1, 3}, {5, 5}});
  EXPECT_THAT(a, ElementsAre(FieldsAre(0, 3), FieldsAre(4, 6)));
  const Intervals b{{2, 5}};
  EXPECT_THAT(common(a, b), ElementsAre(FieldsAre(2, 3), FieldsAre(4, 5)));
  EXPECT_THAT(without(a, b), ElementsAre(FieldsAre(0, 2), FieldsAre(5, 6)));
  EXPECT_THAT(without(b, a), ElementsAre(FieldsAre(3, 4)));
  EXPECT_EQ(length(a), 5);
  EXPECT_EQ(length_in(a, {1, 4.5}), 2.5);
}

TEST(Units, FormatThreeSignificantFigures) {
  EXPECT_EQ(time_text(8.4), "8.40 us");
  EXPECT_EQ(time_text(999.4), "999 us");
  EXPECT_EQ(time_text(999.6), "1.00 ms");
  EXPECT_EQ(time_text(12340), "12.3 ms");
  EXPECT_EQ(time_text(2.5e6), "2.50 s");
  EXPECT_EQ(time_text(1e3), "1.00 ms");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(25 << 20), "25.0 MiB");
  EXPECT_EQ(bytes_text((1 << 20) - 1), "1.00 MiB");
}

TEST(Analysis, DividesAStepIntoItsParts) {
  const Analysis a = analysis_of(straggling());
  EXPECT_EQ(a.warm_up, 5U);
  EXPECT_EQ(a.steps.size(), 34U);  // the last one has no next
  EXPECT_NEAR(a.period, 10000, 1);
  EXPECT_NEAR(a.computing, 0.75, 1e-3);
  EXPECT_NEAR(a.late, 0.15, 1e-3);
  EXPECT_NEAR(a.communication, 0, 1e-3);
  EXPECT_NEAR(a.between, 0.1, 1e-3);
  EXPECT_NEAR(a.stall, 0.3, 1e-3);
  EXPECT_NEAR(a.waits.at({0, 1}), 3000, 1);
  EXPECT_EQ(a.waits.size(), 1U);
  EXPECT_NEAR(a.ranks[0].late, 3000, 1);
  EXPECT_NEAR(a.ranks[1].late, 0, 1);
}

// Rank 0 publishes a bucket each ms from 3 ms on; rank 1 each 1.5 ms from 4.5 ms on, and it is
// reduced then. Rank 0's backward computes until 6 ms.
TEST(Analysis, OverlapIsWithinBackwardAndOutsideOfWaits) {
  const Analysis a = analysis_of(straggling());
  EXPECT_NEAR(a.ranks[0].under_way, 9000 - 3000, 1);
  EXPECT_NEAR(a.ranks[0].hidden, 6000 - 3000, 1);
  EXPECT_NEAR(a.overlap, 0.5, 1e-3);
}

// Rank 1 comes 3 ms late to each step, as all see before the forward, and to none of its buckets.
TEST(Analysis, PreForwardSyncShowsALateRank) {
  const Analysis a = analysis_of(
      {.between = [](int rank, int) { return rank == 1 ? 4000.0 : 1000.0; }, .meets = true});
  EXPECT_NEAR(a.waits.at({0, 1}), 3000, 1);
  EXPECT_NEAR(a.ranks[0].late, 3000, 1);
  EXPECT_NEAR(a.ranks[0].computing, 9000, 1);
  EXPECT_NEAR(a.ranks[1].late, 0, 1);
  const Diagnosis diagnosis = diagnose(a);
  EXPECT_EQ(diagnosis.finding, Finding::late_starter);
  EXPECT_EQ(diagnosis.rank, 1);
}

TEST(Analysis, CountsAccumulationAsComputing) {
  auto traces = make_timelines(
      {.computing = [](int, int) { return 6000.0; }, .between = [](int, int) { return 4000.0; }});
  // The gap holds a forward and backward that were not synchronised, of 3 ms.
  for (RankTrace& trace : traces) {
    const auto spans = trace.spans;
    for (const Span& span : spans) {
      if (span.kind != Kind::step) continue;
      Span more = span;
      more.kind = Kind::backward;
      more.begin = span.end;
      more.end = span.end + std::chrono::milliseconds(3);
      trace.spans.push_back(more);
    }
  }
  EXPECT_NEAR(analyse(merge(traces)).between, 0.1, 1e-3);
}

TEST(Analysis, ShowsTheModelThatTakesMostTime) {
  auto traces = make_timelines({.steps = 20});
  for (RankTrace& trace : traces) {
    const auto spans = trace.spans;
    for (Span span : spans) {
      span.model = 7;
      span.begin += std::chrono::hours(1);
      span.end += std::chrono::hours(1) + std::chrono::milliseconds(1);
      trace.spans.push_back(span);
    }
  }
  const Analysis a = analyse(merge(traces));
  EXPECT_EQ(a.models, 2U);
  EXPECT_EQ(a.model, 7U);
}

TEST(Analysis, LeavesOutStepsThatSomeRanksDoNotHave) {
  auto traces = make_timelines({});
  std::erase_if(traces[1].spans, [](const Span& span) { return span.step > 20; });
  EXPECT_EQ(analyse(merge(traces)).steps.size(), 19U - 4);  // a quarter is warm-up
}

// Between two samples, figures grow evenly.
TEST(ThreadSeries, InterpolatesBetweenSamples) {
  const Clock::time_point origin(std::chrono::seconds(9));
  const auto at = [&](int microseconds) {
    return origin + std::chrono::microseconds(microseconds);
  };
  const std::vector<ThreadUse> samples{{at(0), 100, 10, 0, 0}, {at(1000), 700, 210, 1, 4}};
  const ThreadSeries series(samples, origin);
  EXPECT_TRUE(series.known());
  EXPECT_THAT(series.within({0, 1000}), FieldsAre(600, 200, 1, 4));
  EXPECT_THAT(series.within({250, 500}), FieldsAre(150, 50, 0.25, 1));
  EXPECT_THAT(series.within({-500, 2000}), FieldsAre(600, 200, 1, 4));
  const std::vector<ThreadUse> unknown{{at(0), 100}, {at(1000), 700}};
  EXPECT_FALSE(ThreadSeries(unknown, origin).known());
  EXPECT_THAT(ThreadSeries(unknown, origin).within({0, 1000}), FieldsAre(0, 0, 0, 0));
}

// Of the second in which the job trained, not of its start; each core once.
TEST(MachineUse, IsOfTheWindow) {
  const Clock::time_point origin(std::chrono::seconds(9));
  Job job;
  job.size = 2;
  for (int rank = 0; rank < 2; ++rank) {
    RankTrace& trace = job.ranks.emplace_back();
    trace.affinity = {0, 1};
    for (std::int64_t second = -2; second <= 2; ++second) {
      const std::int64_t time = 1'000'000 * (second + 2);
      trace.cpu.push_back({.wall = time,
                           .used = second > 0 ? 600'000 * second : 0,
                           .at = origin + std::chrono::seconds(second),
                           .periods = 10 * (second + 2),
                           .throttled = second > 0 ? 3 * second : 0,
                           .busy = 2 * time,
                           .machine = 3 * time});
    }
  }
  const MachineUse use = machine_use(job, 2, {500'000, 1'500'000}, origin);
  EXPECT_NEAR(use.used.value(), 1.2, 1e-9);
  EXPECT_NEAR(use.foreign.value(), 0.8, 1e-9);
  EXPECT_NEAR(use.elsewhere.value(), 1, 1e-9);
  EXPECT_NEAR(use.throttled.value(), 0.3, 1e-9);
  EXPECT_FALSE(use.stolen.has_value());
  // One more rank, of which nothing is known, may use any of it.
  const MachineUse part = machine_use(job, 3, {500'000, 1'500'000}, origin);
  EXPECT_FALSE(part.used.has_value());
  EXPECT_FALSE(part.foreign.has_value());
  EXPECT_FALSE(part.elsewhere.has_value());
  job.ranks[1].affinity = {1, 2};  // cannot be told apart
  EXPECT_FALSE(machine_use(job, 2, {0, 1e6}, origin).foreign.has_value());
}

TEST(Merge, LeavesOutOtherJobs) {
  auto traces = make_timelines({.ranks = 3});
  for (RankTrace& trace : traces) trace.started = 100;
  traces[0].started = 50;
  traces[0].size = 4;
  auto twin = traces[2];
  twin.path = "rank9.json";
  traces.push_back(twin);
  traces[1].boot = "another";
  traces[2].started = 200;
  const Job job = merge(traces);
  ASSERT_EQ(job.ranks.size(), 1U);
  EXPECT_EQ(job.ranks[0].rank, 2);
  EXPECT_THAT(job.notes,
              ElementsAre(HasSubstr("rank1.json was written on another machine"),
                          HasSubstr("rank0.json belongs to another job, of 4 ranks instead of 3"),
                          HasSubstr("rank9.json names rank 2, as another file does"),
                          HasSubstr("there is no timeline of ranks 0-1 (of 3 ranks)")));
}

TEST(Merge, LeavesOutEarlierRuns) {
  auto traces = make_timelines({});
  for (Span& span : traces[0].spans) {
    span.begin += std::chrono::hours(1);
    span.end += std::chrono::hours(1);
  }
  traces[0].started = 60'000'000;
  EXPECT_THAT(merge(traces).notes, Contains(HasSubstr("rank1.json belongs to an earlier job")));
  // Ranks that started together belong together, whatever came between their few steps.
  traces[0].started = 1'000'000;
  EXPECT_THAT(merge(traces).notes, IsEmpty());
  EXPECT_THAT(merge(make_timelines({})).notes, IsEmpty());
}

}  // namespace
}  // namespace paceline::report
