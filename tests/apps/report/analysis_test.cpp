#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "report/analysis/intervals.h"
#include "report/analysis/machine_use.h"
#include "report/analysis/replay.h"
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
using ::testing::Not;

Analysis analysis_of(const MadeJob& job) {
  return analyse(merge(make_timelines(job)));
}

Diagnosis diagnosis_of(const MadeJob& job) {
  return diagnose(analysis_of(job));
}

std::vector<std::string> texts_of(const Diagnosis& diagnosis) {
  std::vector<std::string> texts;
  for (const Remedy& remedy : diagnosis.remedies) texts.push_back(remedy.text);
  return texts;
}

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

// 1 of 10 ms is between steps; of 9, rank 1 computes all and rank 0 six.
MadeJob straggling() {
  return {.computing = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; },
          .between = [](int, int) { return 1000.0; }};
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

TEST(Diagnosis, OneRankComputesLonger) {
  const Diagnosis diagnosis = diagnosis_of(straggling());
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.rank, 1);
  EXPECT_EQ(diagnosis.sentence,
            "Rank 1 holds this run back: it computes 9.00 ms a step, the others 6.00 ms (+50 %); "
            "the others wait for it 3.00 ms a step, 30 % of their time.");
  // Rank 1 publishes at 4.5, 6, 7.5 and 9 ms: each of the last two is waited for for 1.5 ms.
  EXPECT_THAT(diagnosis.why,
              Contains(HasSubstr("They wait longest for bucket 2 (1.00 MiB: layers.2.")));
}

TEST(Diagnosis, OneRankBeginsLater) {
  const Diagnosis diagnosis =
      diagnosis_of({.computing = [](int, int) { return 6000.0; },
                    .between = [](int rank, int) { return rank == 0 ? 3000.0 : 1000.0; }});
  EXPECT_EQ(diagnosis.finding, Finding::late_starter);
  EXPECT_EQ(diagnosis.rank, 0);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("it starts its steps 2.00 ms later than the others"));
}

TEST(Diagnosis, LoadIsUneven) {
  const Diagnosis diagnosis = diagnosis_of({.ranks = 4, .computing = [](int rank, int step) {
                                              return step % 4 == rank ? 9000.0 : 6000.0;
                                            }});
  EXPECT_EQ(diagnosis.finding, Finding::uneven_load);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("the others wait 3.00 ms a step, 33 % of their time"));
}

TEST(Diagnosis, MoreRanksThanCores) {
  const auto on_two_cores = [](const MadeJob& job) {
    auto traces = make_timelines(job);
    for (RankTrace& trace : traces) trace.cores = 2;
    return diagnose(analyse(merge(traces)));
  };
  const auto changing = [](int rank, int step) { return step % 4 == rank ? 9000.0 : 6000.0; };
  const auto slow = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; };
  const Diagnosis diagnosis = on_two_cores({.ranks = 4, .computing = changing});
  EXPECT_EQ(diagnosis.finding, Finding::too_many_ranks);
  EXPECT_THAT(diagnosis.sentence,
              HasSubstr("4 ranks take turns on 2 cores, and wait for each other for 25 % of "
                        "their time"));
  EXPECT_EQ(on_two_cores({.ranks = 3, .reduction = 3000}).finding, Finding::too_many_ranks);
  EXPECT_EQ(on_two_cores({.ranks = 4, .computing = slow}).finding, Finding::straggler);
  EXPECT_EQ(on_two_cores({.ranks = 4}).finding, Finding::all_well);
  EXPECT_EQ(on_two_cores({.ranks = 2, .reduction = 3000}).finding, Finding::communication);
}

// Each rank may use one core, and has it for itself.
TEST(Diagnosis, RanksBoundToDifferentCoresAreNotTooMany) {
  auto traces = make_timelines({.ranks = 2, .reduction = 3000});
  for (RankTrace& trace : traces) {
    trace.cores = 1;
    trace.affinity = {4 + trace.rank};
  }
  EXPECT_EQ(analyse(merge(traces)).cores, 2);
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::communication);
  for (RankTrace& trace : traces) trace.affinity = {4};
  EXPECT_EQ(analyse(merge(traces)).cores, 1);
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::too_many_ranks);
  // A quota, which both have.
  for (RankTrace& trace : traces) trace.affinity = {0, 1, 2, 3};
  EXPECT_EQ(analyse(merge(traces)).cores, 1);
}

// Also one whose timeline is missing takes its turn on the cores; not one of another machine.
TEST(Diagnosis, CountsTheJobsRanksNotItsFiles) {
  auto traces = make_timelines(
      {.ranks = 4, .computing = [](int rank, int step) { return step % 4 == rank ? 9e3 : 6e3; }});
  for (RankTrace& trace : traces) trace.cores = 2;
  auto two = traces;
  two.resize(2);
  EXPECT_EQ(diagnose(analyse(merge(two))).finding, Finding::too_many_ranks);
  EXPECT_THAT(diagnose(analyse(merge(two))).sentence, HasSubstr("4 ranks take turns on 2 cores"));
  for (RankTrace& trace : two) trace.local_size = 2;
  EXPECT_NE(diagnose(analyse(merge(two))).finding, Finding::too_many_ranks);
  traces[2].boot = traces[3].boot = "another";
  EXPECT_EQ(analyse(merge(traces)).local_size, 2);
  EXPECT_NE(diagnose(analyse(merge(traces))).finding, Finding::too_many_ranks);
}

// 25 KiB that all ranks wait for a third of the time, on 4 cores.
std::vector<RankTrace> small_and_exposed() {
  auto traces = make_timelines({.buckets = 1, .reduction = 4500});
  for (RankTrace& trace : traces) {
    for (auto& [key, bucket] : trace.buckets) bucket.bytes = 25 << 10;
    trace.cores = 4;
  }
  return traces;
}

TEST(Diagnosis, DoesNotSuggestCompressionForFewBytes) {
  const Diagnosis diagnosis = diagnose(analyse(merge(small_and_exposed())));
  EXPECT_EQ(diagnosis.finding, Finding::delayed);
  EXPECT_THAT(diagnosis.why,
              Contains(HasSubstr("have 25.0 KiB. Even a slow network moves that in 556 us, "
                                 "so their size does not explain 4.50 ms a step")));
  EXPECT_THAT(texts_of(diagnosis), Not(Contains(HasSubstr("float16"))));
  EXPECT_THAT(texts_of(diagnosis), Not(Contains(HasSubstr("bucket_cap_mb"))));
  EXPECT_THAT(texts_of(diagnosis_of({.reduction = 3000})), Contains(HasSubstr("float16")));
}

// Eight ranks send 1.75 times as much of each byte as two do.
TEST(Diagnosis, TheNetworkTakesLongerForMoreRanks) {
  for (const auto& [ranks, finding] :
       {std::pair{2, Finding::delayed}, {8, Finding::communication}}) {
    auto traces = make_timelines({.ranks = ranks, .buckets = 1, .reduction = 4500});
    for (RankTrace& trace : traces) {
      for (auto& [key, bucket] : trace.buckets) bucket.bytes = 150'000;
    }
    EXPECT_EQ(diagnose(analyse(merge(traces))).finding, finding) << ranks;
  }
}

TEST(Diagnosis, SaysThatSizesAreNotKnown) {
  auto traces = make_timelines({.buckets = 2, .reduction = 4500});
  for (RankTrace& trace : traces) trace.buckets.erase({0, 0});
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::communication);
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("Timelines lack the size of a bucket")));
  EXPECT_THAT(texts_of(diagnosis), Not(Contains(HasSubstr("float16"))));
}

TEST(Diagnosis, CoresAreSharedWithOtherWork) {
  auto traces = small_and_exposed();
  // Of the time in which they could have run, half; together on 1.2 of 4 cores.
  for (RankTrace& trace : traces) trace.cpu = {CpuUse{10'000'000, 6'000'000, 4'000'000, 4'000'000}};
  const Diagnosis foreign = diagnose(analyse(merge(traces)));
  EXPECT_EQ(foreign.finding, Finding::shared_cores);
  EXPECT_THAT(foreign.sentence, HasSubstr("The cores are shared with other work: ranks wait for a "
                                          "core 50 % of the time in which they could run, and wait "
                                          "for each other 33 % of all time"));
  EXPECT_THAT(foreign.why, Contains(HasSubstr("The ranks use 1.2 of 4 cores")));
  EXPECT_THAT(texts_of(foreign), Not(Contains(HasSubstr("float16"))));

  // All cores are the job's own: its threads are too many.
  for (RankTrace& trace : traces) trace.cpu.back().used = 20'000'000;
  const Diagnosis own = diagnose(analyse(merge(traces)));
  EXPECT_EQ(own.finding, Finding::shared_cores);
  EXPECT_THAT(own.sentence, HasSubstr("The job's threads share too few cores"));
  EXPECT_THAT(texts_of(own), Contains(HasSubstr("OMP_NUM_THREADS")));

  for (RankTrace& trace : traces) trace.cpu.back().queued = 200'000;
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::delayed);
  // Also if all are slowed down alike, so that none waits for another.
  auto alike = make_timelines({});
  for (RankTrace& trace : alike) trace.cpu = {CpuUse{10'000'000, 6'000'000, 4'000'000, 1'000'000}};
  EXPECT_EQ(diagnose(analyse(merge(alike))).finding, Finding::shared_cores);
  // One rank's core alone: it is late, as it waits for its core.
  auto one = make_timelines(straggling());
  one[0].cpu = {CpuUse{10'000'000, 6'000'000, 4'000'000, 0}};
  one[1].cpu = {CpuUse{10'000'000, 6'000'000, 4'000'000, 4'000'000}};
  EXPECT_EQ(diagnose(analyse(merge(one))).finding, Finding::shared_cores);
  EXPECT_THAT(diagnose(analyse(merge(one))).why,
              Contains(HasSubstr("Rank 1 waits longest: 50 % of the time")));
  // The other's core alone, which is not late.
  std::swap(one[0].cpu, one[1].cpu);
  EXPECT_EQ(diagnose(analyse(merge(one))).finding, Finding::straggler);
}

// All publish their last bucket at 9 ms; the four are reduced one after the other, 3 ms each, from
// 4.5 ms on: 16.5 ms in all, of which 7.5 are waited for, 1.5 of them for bucket 1.
TEST(Diagnosis, CommunicationIsExposed) {
  const Diagnosis diagnosis = diagnosis_of({.reduction = 3000});
  EXPECT_EQ(diagnosis.finding, Finding::communication);
  EXPECT_THAT(diagnosis.bucket, ::testing::AnyOf(2, 3));
  EXPECT_THAT(diagnosis.sentence, HasSubstr("45 % of the time is spent waiting for gradients"));
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("(1.00 MiB: layers.")));
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("Backward hid 38 % of the communication")));
  EXPECT_THAT(texts_of(diagnosis), Contains(HasSubstr("Try other values of bucket_cap_mb")));
}

TEST(Diagnosis, OneLargeBucketShouldBeDivided) {
  const Diagnosis diagnosis = diagnosis_of({.buckets = 1, .reduction = 3000});
  EXPECT_EQ(diagnosis.bucket, 0);
  EXPECT_THAT(texts_of(diagnosis), Contains(HasSubstr("Set a smaller bucket_cap_mb")));
}

TEST(Diagnosis, StepsAreTooShort) {
  const auto diagnosis_with = [](double computing, std::uint64_t bytes) {
    return diagnosis_of({.buckets = 1,
                         .bytes = bytes,
                         .computing = [=](int, int) { return computing; },
                         .reduction = computing * 2 / 3});
  };
  const Diagnosis diagnosis = diagnosis_with(60, 1 << 10);
  EXPECT_EQ(diagnosis.finding, Finding::short_steps);
  EXPECT_THAT(diagnosis.sentence,
              HasSubstr("a step takes 100 us, and ranks wait for each other for 40 %"));
  EXPECT_EQ(diagnosis_with(990, 1 << 10).finding, Finding::short_steps);
  EXPECT_NE(diagnosis_with(1010, 1 << 10).finding, Finding::short_steps);
  // The bytes explain the wait.
  EXPECT_EQ(diagnosis_with(990, 1 << 20).finding, Finding::communication);
}

TEST(Diagnosis, TimePassesBetweenSteps) {
  const Diagnosis diagnosis = diagnosis_of(
      {.computing = [](int, int) { return 6000.0; }, .between = [](int, int) { return 4000.0; }});
  EXPECT_EQ(diagnosis.finding, Finding::between_steps);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("40 % of the time passes between steps"));
  EXPECT_THAT(diagnosis.sentence, HasSubstr("4.00 ms of 10.0 ms a step"));
}

TEST(Diagnosis, LongPausesDoNotCountAsSteps) {
  const auto job = [](double pause) {
    return MadeJob{.between = [=](int, int step) { return step % 20 == 0 ? pause : 1000; }};
  };
  // One of 34 steps is followed by a pause; the step after it is left out, too.
  const Analysis some = analysis_of(job(110e3));
  EXPECT_EQ(some.pauses, 1U);
  EXPECT_EQ(some.steps.size(), 34U - 2);
  EXPECT_NEAR(some.between, 0.1, 1e-3);
  EXPECT_EQ(diagnose(some).finding, Finding::all_well);

  const Diagnosis many = diagnosis_of(job(1e6));
  EXPECT_EQ(many.finding, Finding::pauses);
  EXPECT_THAT(many.sentence, HasSubstr("75 % of the time passes in 1 long pause"));
}

// Four workers that each need four steps for a batch.
TEST(Diagnosis, ALoaderThatBlocksInEachFourthStepMakesNoPauses) {
  const auto job = [](int every, double blocked) {
    return MadeJob{.computing = [](int, int) { return 10e3; },
                   .between = [=](int, int step) { return step % every == 0 ? blocked : 0.0; }};
  };
  EXPECT_EQ(diagnosis_of(job(4, 40e3)).finding, Finding::between_steps);
  EXPECT_EQ(analysis_of(job(4, 40e3)).pauses, 0U);
  // Rare, or longer than batches take to load.
  EXPECT_EQ(diagnosis_of(job(12, 80e3)).finding, Finding::pauses);
  EXPECT_EQ(diagnosis_of(job(4, 120e3)).finding, Finding::pauses);
}

TEST(Diagnosis, AllIsWell) {
  const Diagnosis diagnosis = diagnosis_of({.between = [](int, int) { return 1000.0; }});
  EXPECT_EQ(diagnosis.finding, Finding::all_well);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("90 % of the time is computing"));
  EXPECT_THAT(diagnosis.sentence, HasSubstr("time between steps (10 %)"));
}

TEST(Diagnosis, OneRankAloneIsDiagnosedToo) {
  EXPECT_EQ(diagnosis_of({.ranks = 1}).finding, Finding::all_well);
}

TEST(Diagnosis, TooFewSteps) {
  EXPECT_EQ(diagnosis_of({.steps = 9}).finding, Finding::too_few_steps);
  EXPECT_NE(diagnosis_of({.steps = 14}).finding, Finding::too_few_steps);
  const Diagnosis none = diagnosis_of({.steps = 0});
  EXPECT_EQ(none.finding, Finding::too_few_steps);
  EXPECT_THAT(none.why, Contains(HasSubstr("No timeline has a step")));
}

// What the first remedy promises.
Prediction prediction_of(const Diagnosis& diagnosis) {
  if (diagnosis.remedies.empty() || !diagnosis.remedies[0].prediction) return {};
  return *diagnosis.remedies[0].prediction;
}

double never(int, int) {
  return 0;
}

// 6 ms of computing. In every other step, a rank waits another 6 ms for a core.
MadeJob preempted() {
  const auto queued = [](int rank, int step) { return step % 4 == 2 * rank ? 6000.0 : 0.0; };
  return {.computing = [=](int rank, int step) { return 6000 + queued(rank, step); },
          .queued = queued};
}

TEST(Diagnosis, RanksThatWaitForCoresAreNotUneven) {
  const Diagnosis diagnosis = diagnosis_of(preempted());
  EXPECT_EQ(diagnosis.finding, Finding::shared_cores);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("with other work or too many threads of the job"));
  EXPECT_NEAR(prediction_of(diagnosis).before, 9000, 200);
  EXPECT_THAT(diagnosis.why, Not(Contains(HasSubstr("waits longest"))));
  EXPECT_NEAR(prediction_of(diagnosis).after, 6000, 1);
  EXPECT_EQ(text_of({"so", 9000, 6000}), "If so: 9.00 ms -> 6.00 ms a step.");
  // Without waiting for cores, the same times are an uneven load.
  MadeJob uneven = preempted();
  uneven.queued = never;
  EXPECT_EQ(diagnosis_of(uneven).finding, Finding::uneven_load);
}

// Of 25 KiB: a reduction lasts 4 ms longer in every other step, as rank 0 waits for a core.
TEST(Diagnosis, AReductionThatWaitsForACoreIsNoCommunication) {
  MadeJob job{.computing = [](int, int) { return 6000.0; },
              .queued = never,
              .delay = [](int step) { return step % 2 == 0 ? 4000.0 : 0.0; }};
  const auto finding_of = [&](std::uint64_t bytes) {
    auto traces = make_timelines(job);
    for (RankTrace& trace : traces) {
      for (auto& [key, bucket] : trace.buckets) bucket.bytes = bytes;
    }
    return diagnose(analyse(merge(traces)));
  };
  for (const std::uint64_t bytes : {25 << 10, 25 << 20}) {
    EXPECT_EQ(finding_of(bytes).finding, Finding::shared_cores) << bytes;
    EXPECT_NEAR(prediction_of(finding_of(bytes)).before, 8000, 200);
    EXPECT_NEAR(prediction_of(finding_of(bytes)).after, 6000, 1);
  }
  // If no thread waited for a core, the bytes decide.
  job.reduction = 1000;
  job.delay = [](int) { return 0.0; };
  EXPECT_EQ(finding_of(25 << 20).finding, Finding::communication);
  job.reduction = 2000;
  EXPECT_EQ(finding_of(25 << 10).finding, Finding::delayed);
}

TEST(Diagnosis, ARankThatWaitsForItsCoreIsNotSlow) {
  MadeJob job = straggling();
  job.queued = never;
  EXPECT_EQ(diagnosis_of(job).finding, Finding::straggler);
  job.queued = [](int rank, int) { return rank == 1 ? 3000.0 : 0.0; };
  const Diagnosis diagnosis = diagnosis_of(job);
  EXPECT_EQ(diagnosis.finding, Finding::shared_cores);
  EXPECT_NEAR(prediction_of(diagnosis).after, 7000, 1);
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("Rank 1 waits longest: 33 %")));
  EXPECT_THAT(diagnosis.why, Not(Contains(HasSubstr("Processes that are no ranks"))));
  // Slower, and waiting a little.
  job.queued = [](int rank, int) { return rank == 1 ? 500.0 : 0.0; };
  EXPECT_EQ(diagnosis_of(job).finding, Finding::straggler);
}

// The missing rank may be the one that all wait for, so that nothing can be replayed.
TEST(Diagnosis, WithoutATimelineLongQueuesAreASign) {
  auto traces = make_timelines(preempted());
  traces.pop_back();
  const Analysis a = analyse(merge(traces));
  EXPECT_FALSE(a.replayed);
  EXPECT_FALSE(a.queue_gain.has_value());
  EXPECT_EQ(diagnose(a).finding, Finding::shared_cores);
  // Of four ranks, three of which are here; rank 1 is slow and does not queue.
  MadeJob job{.ranks = 4,
              .computing = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; },
              .queued = [](int rank, int) { return rank == 1 ? 0.0 : 2000.0; }};
  traces = make_timelines(job);
  traces.pop_back();
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::straggler);
  EXPECT_EQ(diagnose(analyse(merge(traces))).rank, 1);
}

// Another thread trains from the fifth step on, which is not sampled.
TEST(Analysis, SamplesOfAFewStepsAreNotEnough) {
  auto traces = make_timelines(preempted());
  ASSERT_TRUE(analyse(merge(traces)).thread_known);
  for (RankTrace& trace : traces) trace.thread.resize(8);
  const Analysis a = analyse(merge(traces));
  EXPECT_FALSE(a.thread_known);
  EXPECT_FALSE(a.waiting_between.has_value());
  EXPECT_FALSE(a.faults.has_value());
  EXPECT_FALSE(a.queued.has_value());
}

// All waits are parts of the time that was measured: of 10 ms, a core is waited for for 4, and for
// communication 2.7, which are 45 % of the 6 ms that are left.
TEST(Diagnosis, PartsOfTheSameTimeAreCompared) {
  const MadeJob job{.buckets = 1,
                    .computing = [](int, int) { return 7300.0; },
                    .queued = [](int, int) { return 4000.0; },
                    .reduction = 2700};
  const Analysis a = analysis_of(job);
  EXPECT_NEAR(a.queue_gain.value(), 0.4, 1e-3);
  EXPECT_NEAR(a.settled.communication, 0.27, 1e-3);
  EXPECT_EQ(diagnose(a).finding, Finding::shared_cores);
}

// A queue of 0.4 ms does not explain 3 ms of communication.
TEST(Analysis, CommunicationIsOnlyShortenedByTheQueue) {
  MadeJob job{.buckets = 1,
              .computing = [](int, int) { return 6000.0; },
              .queued = [](int, int step) { return step % 2 == 0 ? 400.0 : 0.0; },
              .reduction = 1000};
  auto traces = make_timelines(job);
  EXPECT_NEAR(analyse(merge(traces)).settled.communication, 1000.0 / 7000, 1e-3);
  // 2 ms more in each other step, as from a slow network.
  job.delay = [](int step) { return step % 2 == 0 ? 2000.0 : 0.0; };
  traces = make_timelines(job);
  for (RankTrace& trace : traces) {
    const auto own =
        make_timelines({.buckets = 1, .computing = job.computing, .queued = job.queued});
    for (std::size_t i = 0; i < trace.thread.size(); ++i) {
      trace.thread[i].queued = own[1].thread[i].queued;  // none in the reduction
    }
  }
  // 1 ms, and in each other step 2 ms less the queues of both ranks.
  const Analysis a = analyse(merge(traces));
  EXPECT_NEAR(a.settled.communication, (1000 + (2000 - 800) / 2.0) / 8000, 2e-3);
}

// All reduce for 4 of 10 ms, rank 0 in its backward; nobody is late.
TEST(Analysis, ARankThatReducesIsNotLate) {
  auto traces = make_timelines({.ranks = 4,
                                .buckets = 1,
                                .computing = [](int, int) { return 6000.0; },
                                .queued = never,
                                .reduction = 4000});
  std::erase_if(traces[0].spans, [](const Span& span) { return span.kind == Kind::wait; });
  const Analysis a = analyse(merge(traces));
  ASSERT_TRUE(a.replayed);
  EXPECT_NEAR(a.stall, 0, 1e-3);
  EXPECT_NEAR(a.settled.stall, 0, 1e-3);
  EXPECT_NEAR(a.settled.communication, 0.3, 1e-3);  // of three in four ranks
  EXPECT_NE(diagnose(a).finding, Finding::straggler);
  // Its 10 ms of work stay, however fast the network is.
  EXPECT_NEAR(Replay(a.steps).period(), 10000, 1);
  EXPECT_NEAR(Replay(a.steps).with_communication(0).period(), 10000, 1);
}

// Rank 0 spins while it waits 3 ms for rank 1, and shares its core then.
TEST(Analysis, AQueueWithinALateWaitCostsNothing) {
  auto traces = make_timelines(
      {.computing = [](int rank, int) { return rank == 1 ? 9e3 : 6e3; }, .queued = never});
  for (std::size_t i = 0; i < traces[0].thread.size(); ++i) {
    traces[0].thread[i].queued = static_cast<std::int64_t>(3000 * ((i + 1) / 2));
  }
  const Analysis a = analyse(merge(traces));
  ASSERT_TRUE(a.replayed);
  EXPECT_NEAR(a.queue_gain.value(), 0, 1e-3);
  EXPECT_NEAR(a.settled.stall, 3000.0 / 9000, 1e-3);
  EXPECT_EQ(diagnose(a).finding, Finding::straggler);
  EXPECT_EQ(diagnose(a).rank, 1);
}

// Ranks take turns to wait 3 ms for a core between steps: others are late in the next step.
TEST(Analysis, AQueueBetweenStepsCountsInTheNextStep) {
  const auto between = [](int rank, int step) { return step % 2 == rank ? 3000.0 : 0.0; };
  auto traces = make_timelines(
      {.computing = [](int, int) { return 6000.0; }, .between = between, .queued = never});
  for (RankTrace& trace : traces) {
    std::int64_t queued = 0;
    for (std::size_t i = 0; i < trace.thread.size(); ++i) {
      // The sample at the begin of step i / 2 + 1 comes after the time between steps before.
      if (i % 2 == 0 && i > 0) {
        queued += std::llround(between(trace.rank, static_cast<int>(i / 2)));
      }
      trace.thread[i].queued = queued;
    }
  }
  const Analysis a = analyse(merge(traces));
  EXPECT_NEAR(a.queue_gain.value(), 3000.0 / 9000, 2e-2);
  EXPECT_NEAR(a.settled.stall, 0, 2e-2);
  EXPECT_NEAR(a.settled.between, 0, 1e-2);
  EXPECT_NEAR(a.between, 1500.0 / 9000, 1e-2);
  EXPECT_EQ(diagnose(a).finding, Finding::shared_cores);
}

// Rank 1 computes for 8 ms. Others do for 9 ms in most steps, as they queue for 4 of these, and
// rank 1 is waited for in no step; without queues they would wait 3 ms for it.
TEST(Diagnosis, ComparesNoTimesThatContradictTheSentence) {
  const MadeJob job{.ranks = 3,
                    .computing = [](int rank, int) { return rank == 1 ? 8000.0 : 9000.0; },
                    .queued = [](int rank, int) { return rank == 1 ? 0.0 : 4000.0; }};
  const Analysis a = analysis_of(job);
  EXPECT_NEAR(a.settled.stall, 3000.0 / 9000, 1e-3);
  EXPECT_NEAR(a.settled.stall_causes.at(1), 1, 1e-3);
  EXPECT_NEAR(a.queue_gain.value(), 1000.0 / 9000, 1e-3);
  const Diagnosis diagnosis = diagnose(a);
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.sentence,
            "Rank 1 holds this run back: the others wait for it 3.00 ms a step, 33 % of their "
            "time.");
}

TEST(Diagnosis, ACpuLimitIsNoForeignWork) {
  auto traces = make_timelines(preempted());
  for (RankTrace& trace : traces) {
    trace.affinity = {0, 1};
    trace.cores = 2;
    trace.cpu = {CpuUse{
        .wall = 1'000'000, .used = 600'000, .periods = 10, .throttled = 1, .busy = 2'000'000}};
  }
  const Diagnosis foreign = diagnose(analyse(merge(traces)));
  EXPECT_EQ(foreign.finding, Finding::shared_cores);
  EXPECT_THAT(foreign.why,
              Contains(HasSubstr("Processes that are no ranks use 0.8 of the job's cores")));
  for (RankTrace& trace : traces) trace.cpu.back().throttled = 9;
  const Diagnosis limited = diagnose(analyse(merge(traces)));
  EXPECT_EQ(limited.finding, Finding::cpu_limit);
  EXPECT_NEAR(prediction_of(limited).after, 6000, 1);
  // Also if it leaves fewer cores than there are ranks.
  for (RankTrace& trace : traces) trace.cores = 1;
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::cpu_limit);
  for (RankTrace& trace : traces) trace.cores = 2;
  // The cores hold no work but the job's.
  for (RankTrace& trace : traces) {
    trace.cpu.back().throttled = 0;
    trace.cpu.back().busy = 1'210'000;
  }
  EXPECT_THAT(diagnose(analyse(merge(traces))).sentence,
              HasSubstr("The job's threads share too few cores"));
}

// Ranks 0 and 1 on one core, rank 2 on two others.
TEST(Diagnosis, RanksBoundToTheSameCore) {
  MadeJob job = preempted();
  job.ranks = 3;
  auto traces = make_timelines(job);
  for (RankTrace& trace : traces) {
    trace.affinity = trace.rank < 2 ? std::set{4} : std::set{5, 6};
    trace.cores = static_cast<int>(trace.affinity.size());
  }
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::same_cores);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("Ranks 0, 1 are bound to the same cores"));
  EXPECT_NEAR(prediction_of(diagnosis).after, 6000, 1);
}

TEST(Diagnosis, TheMachineLacksMemory) {
  auto traces = make_timelines({.queued = never});
  for (RankTrace& trace : traces) {
    trace.cpu = {CpuUse{.wall = 1'000'000, .memory_pressure = 300'000}};
  }
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::all_well);  // others lack it
  for (RankTrace& trace : traces) {
    for (std::size_t i = 0; i < trace.thread.size(); ++i) {
      trace.thread[i].faults = static_cast<std::int64_t>(i);
    }
  }
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::memory);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("tasks wait for it 30 % of the time"));
  // Something else takes more of the time.
  auto slower = make_timelines({.computing = [](int, int) { return 6000.0; },
                                .between = [](int, int) { return 4000.0; },
                                .queued = never});
  for (std::size_t i = 0; i < slower.size(); ++i) {
    slower[i].cpu = traces[i].cpu;
    for (std::size_t j = 0; j < slower[i].thread.size(); ++j) {
      slower[i].thread[j].faults = static_cast<std::int64_t>((j + 1) / 2);  // none between steps
    }
  }
  EXPECT_EQ(diagnose(analyse(merge(slower))).finding, Finding::between_steps);
}

TEST(Diagnosis, PagesReadBetweenStepsAreLackOfMemoryIfTheyWereDropped) {
  auto traces = make_timelines({.computing = [](int, int) { return 6000.0; },
                                .between = [](int, int) { return 4000.0; },
                                .queued = never});
  const auto diagnosis_with = [&](std::int64_t memory_pressure, std::size_t faults) {
    for (RankTrace& trace : traces) {
      trace.cpu = {CpuUse{.wall = 1'000'000, .memory_pressure = memory_pressure}};
      for (std::size_t j = 0; j < trace.thread.size(); ++j) {
        trace.thread[j].faults = static_cast<std::int64_t>(faults * (j / 2));  // between two steps
      }
    }
    return diagnose(analyse(merge(traces)));
  };
  const Diagnosis dropped = diagnosis_with(20'000, 8);
  EXPECT_EQ(dropped.finding, Finding::memory);
  EXPECT_THAT(dropped.why, Contains(HasSubstr("ranks wait for pages up to 40 % of the time")));
  EXPECT_NEAR(prediction_of(dropped).after, 6000, 1);
  EXPECT_EQ(diagnosis_with(0, 8).finding, Finding::between_steps);  // read for the first time
  // Few pages do not explain the sleep, whoever else lacks memory.
  EXPECT_EQ(diagnosis_with(20'000, 1).finding, Finding::between_steps);
  EXPECT_EQ(diagnosis_with(20'000, 3).finding, Finding::between_steps);
}

TEST(Diagnosis, UseOfOtherCoresIsMentioned) {
  auto traces = make_timelines({.queued = never});
  for (RankTrace& trace : traces) {
    trace.affinity = {0, 1};
    trace.cores = 2;
    trace.cpu = {CpuUse{.wall = 1'000'000, .busy = 2'000'000, .machine = 4'000'000}};
  }
  const auto mentioned = [&] {
    const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
    EXPECT_EQ(diagnosis.finding, Finding::all_well);
    return std::ranges::any_of(diagnosis.why, [](const std::string& why) {
      return why.find("Of the machine's other cores, 2.0 are in use") != why.npos;
    });
  };
  EXPECT_TRUE(mentioned());
  // A tenth of the job's cores.
  for (RankTrace& trace : traces) trace.cpu.back().machine = 2'200'000;
  EXPECT_FALSE(mentioned());
  // The missing rank's cores are others' only as far as the timelines know.
  for (RankTrace& trace : traces) trace.cpu.back().machine = 4'000'000;
  traces.pop_back();
  EXPECT_FALSE(mentioned());
}

// Each by hand, of the job of another test.
TEST(Prediction, IsOfTheStepsWithoutTheCause) {
  const Prediction slow = prediction_of(diagnosis_of(straggling()));
  EXPECT_EQ(slow.if_what, "rank 1 were as fast as the others");
  EXPECT_NEAR(slow.before, 10000, 1);
  EXPECT_NEAR(slow.after, 7000, 1);

  // As fast as the others are on the page: 6 and 7 ms have one median everywhere.
  const Diagnosis three = diagnosis_of({.ranks = 3, .computing = [](int rank, int) {
                                          return rank == 1 ? 10e3 : rank == 0 ? 6000.0 : 7000.0;
                                        }});
  EXPECT_THAT(three.sentence, HasSubstr("the others 7.00 ms"));
  EXPECT_NEAR(prediction_of(three).after, 7000, 1);

  const Prediction late = prediction_of(
      diagnosis_of({.computing = [](int, int) { return 6000.0; },
                    .between = [](int rank, int) { return rank == 0 ? 3000.0 : 1000.0; }}));
  EXPECT_NEAR(late.before, 9000, 1);
  EXPECT_NEAR(late.after, 7000, 1);

  // The mean of 9, 6, 6 and 6. Each rank has one slow batch of four.
  const Diagnosis uneven = diagnosis_of({.ranks = 4, .computing = [](int rank, int step) {
                                           return step % 4 == rank ? 9000.0 : 6000.0;
                                         }});
  EXPECT_NEAR(prediction_of(uneven).after, 6750, 1);
  EXPECT_NEAR(uneven.remedies[1].prediction->after, 6750, 1);

  // Of 16.5 ms, 7.5 are waited for.
  const Diagnosis exposed = diagnosis_of({.reduction = 3000});
  EXPECT_NEAR(prediction_of(exposed).after, 9000, 1);
  const auto half = std::ranges::find_if(exposed.remedies, [](const Remedy& remedy) {
    return remedy.text.find("float16") != std::string::npos;
  });
  ASSERT_NE(half, exposed.remedies.end());
  EXPECT_NEAR(half->prediction->after, 12750, 1);

  const Prediction data = prediction_of(diagnosis_of({.computing = [](int, int) { return 6000.0; },
                                                      .between = [](int, int) { return 4000.0; },
                                                      .queued = never}));
  EXPECT_NEAR(data.before, 10000, 1);
  EXPECT_NEAR(data.after, 6000, 1);

  // 4 of 5 steps: a pause of 30 ms each 20th is 1 s of 34 steps of 10 ms.
  const Prediction pauses = prediction_of(
      diagnosis_of({.between = [](int, int step) { return step % 20 == 0 ? 1e6 : 1000.0; }}));
  EXPECT_NEAR(pauses.after, 10000, 1);
  EXPECT_NEAR(pauses.before, 40000, 1500);
}

TEST(Prediction, OfAccumulationDividesCommunicationByFour) {
  const Diagnosis diagnosis = diagnosis_of({.buckets = 1,
                                            .bytes = 1 << 10,
                                            .computing = [](int, int) { return 60.0; },
                                            .reduction = 40});
  EXPECT_NEAR(prediction_of(diagnosis).before, 100, 1);
  EXPECT_NEAR(prediction_of(diagnosis).after, 70, 1);
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

// Without rank 1 nobody knows when it published; rank 0 knows whom it waited for.
TEST(Diagnosis, AMissingRankIsFoundByItsPeers) {
  auto traces = make_timelines(straggling());
  traces.pop_back();
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.rank, 1);
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
