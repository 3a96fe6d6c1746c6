#include <gmock/gmock.h>

#include <string>
#include <utility>
#include <vector>

#include "apps/report/diagnosis_of.h"
#include "report/units.h"
#include "support/made_timelines.h"

namespace paceline::report {
namespace {

using test::MadeJob;
using test::make_timelines;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> texts_of(const Diagnosis& diagnosis) {
  std::vector<std::string> texts;
  for (const Remedy& remedy : diagnosis.remedies) texts.push_back(remedy.text);
  return texts;
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

// Rank 0 saves for 10 ms after every fourth step of 3 ms, and computes 10 us longer: 2.5 ms a step,
// for which rank 1 waits. Without that, steps take 3.01 ms.
TEST(Diagnosis, OneRankBeginsEveryFourthStepLater) {
  for (const int every : {2, 4, 5}) {
    const Diagnosis diagnosis = diagnosis_of(
        {.steps = 46,
         .computing = [](int rank, int) { return rank == 0 ? 3010.0 : 3000.0; },
         .between = [=](int rank,
                        int step) { return rank == 0 && step % every == 0 ? 10e3 : 0.0; }});
    // Steps 6 to 45 are analysed.
    EXPECT_EQ(diagnosis.finding, Finding::late_starter) << every;
    EXPECT_EQ(diagnosis.rank, 0);
    EXPECT_THAT(diagnosis.sentence, HasSubstr("it starts its steps " + time_text(10e3 / every) +
                                              " later than the others on average"));
    // The first or the last of the 40 steps may be one more with or without 10 ms.
    EXPECT_NEAR(prediction_of(diagnosis).before, 3010 + 10e3 / every, 10e3 / 40) << every;
    EXPECT_NEAR(prediction_of(diagnosis).after, 3010, 10e3 / 40) << every;
  }
}

// Rank 1 waits for 3 ms in another model's reductions, and begins its steps 2 us later.
TEST(Diagnosis, ARankIsNoLateStarterIfThatCostsNothing) {
  auto traces =
      make_timelines({.computing = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; },
                      .between = [](int rank, int) { return rank == 1 ? 2.0 : 0.0; }});
  const auto spans = traces[1].spans;
  for (Span span : spans) {
    if (span.kind != Kind::forward) continue;
    span.kind = Kind::wait;
    span.model = 7;
    traces[1].spans.push_back(span);
  }
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.rank, 1);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("holds this run back: the others wait for it 3.00 ms"));
}

// 10 ms in every fourth forward.
TEST(Diagnosis, OneRankComputesLongerInEveryFourthStep) {
  const Diagnosis diagnosis = diagnosis_of({.steps = 46, .computing = [](int rank, int step) {
                                              return rank == 0 && step % 4 == 0 ? 13e3 : 3e3;
                                            }});
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("it computes 5.50 ms a step, the others 3.00 ms"));
  EXPECT_NEAR(prediction_of(diagnosis).after, 3000, 1);
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

// 25 MiB, of which ranks wait 9 ms. Alone they were measured to need 3.28 ms, or 6.55 ms.
TEST(Diagnosis, WhatTheMachineNeedsIsKnownWhereItWasMeasured) {
  const auto job = [](double rate) {
    auto traces = make_timelines({.buckets = 1, .reduction = 9000});
    for (RankTrace& trace : traces) {
      for (auto& [key, bucket] : trace.buckets) bucket.bytes = 25 << 20;
      trace.reductions[0] = {.latency = 10, .rate = rate};
    }
    // It waited for the other rank, which was slower still.
    traces[0].reductions[0] = {.latency = 500, .rate = rate / 2};
    return diagnose(analyse(merge(traces)));
  };
  const Diagnosis delayed = job(8000);
  EXPECT_EQ(delayed.finding, Finding::delayed);
  EXPECT_THAT(
      delayed.why,
      Contains(HasSubstr("have 25.0 MiB. As measured before the first step, idle ranks reduce "
                         "that in 3.29 ms, so their size does not explain 9.00 ms a step")));
  EXPECT_THAT(prediction_of(delayed).if_what, HasSubstr("no longer than measured"));
  EXPECT_NEAR(prediction_of(delayed).before - prediction_of(delayed).after, 9000 - 3287, 1);

  const Diagnosis exposed = job(4000);
  EXPECT_EQ(exposed.finding, Finding::communication);
  EXPECT_THAT(exposed.why, Contains(HasSubstr("idle ranks reduce that in 6.56 ms.")));
  // With a hook: a slow network.
  EXPECT_EQ(job(0).finding, Finding::communication);
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

TEST(Diagnosis, NamesOfParametersArePrintable) {
  auto traces = make_timelines({.buckets = 1, .reduction = 3000});
  for (RankTrace& trace : traces) {
    for (auto& [key, bucket] : trace.buckets) bucket.parameters = "fc\x1b[2J\xc2\x9b.weight";
  }
  EXPECT_THAT(diagnose(analyse(merge(traces))).why,
              Contains(HasSubstr("fc\\x1b[2J\\u009b.weight)")));
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
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("collective calls, in which ranks may wait")));
  EXPECT_THAT(texts_of(diagnosis), Contains(HasSubstr("Look for collective calls between steps")));
}

// 4 ms after three of four steps of 6 ms, and 24 ms after the fourth: 9 of 15 ms on average. The
// median step takes 10 ms.
TEST(Diagnosis, TimesAreSharesOfTheMeanStep) {
  const Diagnosis diagnosis =
      diagnosis_of({.steps = 46,
                    .computing = [](int, int) { return 6000.0; },
                    .between = [](int, int step) { return step % 4 == 0 ? 24e3 : 4e3; }});
  EXPECT_EQ(diagnosis.finding, Finding::between_steps);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("60 % of the time passes between steps"));
  EXPECT_THAT(diagnosis.sentence, HasSubstr("9.00 ms of 15.0 ms a step"));
}

// 2 ms of reductions, and 12 ms in every fourth step: 4.5 ms a step, of 10.5 ms. The median step
// takes 8 ms.
TEST(Diagnosis, DelaysAreSharesOfTheMeanStep) {
  const Diagnosis diagnosis =
      diagnosis_of({.steps = 46,
                    .buckets = 1,
                    .bytes = 1 << 10,
                    .computing = [](int, int) { return 6000.0; },
                    .delay = [](int step) { return step % 4 == 0 ? 10e3 : 0.0; },
                    .reduction = 2000});
  EXPECT_EQ(diagnosis.finding, Finding::delayed);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("they wait 4.50 ms a step"));
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

// Rank 0 alone pauses for 90 ms after one of ten steps of 10 ms, as do the others, which wait for
// it in the next step: 90 of 190 ms. Without pauses, steps take 10 ms.
TEST(Diagnosis, APauseOfOneRankCostsTheOthersAsMuch) {
  const Diagnosis diagnosis =
      diagnosis_of({.ranks = 4, .steps = 46, .between = [](int rank, int step) {
                      return rank == 0 && step % 10 == 0 ? 91e3 : 1e3;
                    }});
  EXPECT_EQ(diagnosis.finding, Finding::pauses);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("47 % of the time passes in 4 long pauses"));
  EXPECT_NEAR(prediction_of(diagnosis).before, 19e3, 1);
  EXPECT_NEAR(prediction_of(diagnosis).after, 10e3, 1);
}

// Two updates of 2 ms after each rollout of 60 ms: of a pair, one step has a pause after it, and
// the other one follows it.
TEST(Diagnosis, PausesThatLeaveFewStepsArePauses) {
  const Diagnosis diagnosis =
      diagnosis_of({.steps = 41,
                    .computing = [](int, int) { return 2e3; },
                    .between = [](int, int step) { return step % 2 == 1 ? 60e3 : 0.0; }});
  EXPECT_EQ(diagnosis.finding, Finding::pauses);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("% of the time passes in 17 long pauses"));
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("too few to judge")));
  EXPECT_FALSE(diagnosis.remedies[0].prediction.has_value());
  EXPECT_EQ(diagnosis_of({.steps = 7, .between = [](int, int) { return 90e3; }}).finding,
            Finding::too_few_steps);
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

// Without rank 1 nobody knows when it published; rank 0 knows whom it waited for.
TEST(Diagnosis, AMissingRankIsFoundByItsPeers) {
  auto traces = make_timelines(straggling());
  traces.pop_back();
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.rank, 1);
}

// The others wait for its part of the reductions, too; whether it publishes late, they know.
TEST(Diagnosis, AMissingRankIsNotLateInReductions) {
  auto traces = make_timelines({.ranks = 4, .reduction = 2500});
  traces.pop_back();
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::communication);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("gradients that the ranks with timelines have "));
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("1 of 4 ranks have no timeline here")));
}

TEST(Diagnosis, AKnownRankIsLateUntilItHasPublishedIfAnotherIsMissing) {
  auto traces =
      make_timelines({.ranks = 4,
                      .bytes = std::uint64_t{1} << 28,
                      .computing = [](int rank, int) { return rank == 1 ? 9300.0 : 9000.0; },
                      .reduction = 2500});
  traces.pop_back();
  for (RankTrace& trace : traces) {
    for (trace::Span& span : trace.spans) {
      if (span.kind == trace::Kind::wait && trace.rank != 1) span.peer = 1;
    }
  }
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::communication);
}

// Waits for another node name no rank: rank 3 there may be late, or the network slow.
TEST(Diagnosis, ALateRankOfAnotherNodeIsNotBlamedOnTheRanksHere) {
  auto traces = make_timelines({.ranks = 4, .bytes = 1024, .computing = [](int rank, int) {
                                  return rank == 3 ? 15000.0 : 10000.0;
                                }});
  traces.resize(2);
  for (RankTrace& trace : traces) {
    for (trace::Span& span : trace.spans) span.peer = -1;
  }
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::delayed);
  EXPECT_THAT(diagnosis.sentence, HasSubstr("gradients that the ranks with timelines have "));
  EXPECT_THAT(diagnosis.why, Contains(HasSubstr("2 of 4 ranks have no timeline here")));
  ASSERT_EQ(diagnosis.remedies.size(), 1U);
  EXPECT_THAT(diagnosis.remedies[0].text, HasSubstr("where the other ranks run"));
  EXPECT_FALSE(diagnosis.remedies[0].prediction);
}

// Each of them is the last one in every other step.
double of_two_slow_ranks(int rank, int step, double slow) {
  return (rank < 2 ? 10000.0 : slow) + ((rank + step) % 2 == 0 ? 120.0 : 0.0);
}

TEST(Diagnosis, SeveralRanksComputeLonger) {
  const Diagnosis diagnosis = diagnosis_of({.ranks = 4, .computing = [](int rank, int step) {
                                              return of_two_slow_ranks(rank, step, 14000.0);
                                            }});
  EXPECT_EQ(diagnosis.finding, Finding::slow_ranks);
  EXPECT_EQ(diagnosis.rank, -1);
  EXPECT_THAT(diagnosis.sentence,
              HasSubstr("Ranks 2, 3 hold this run back: they compute 14.1 ms a step, the others "
                        "10.1 ms (+40 %); ranks wait for late ones "));
  EXPECT_EQ(prediction_of(diagnosis).if_what, "these ranks were as fast as the others");
  EXPECT_NEAR(prediction_of(diagnosis).after, 10120, 20);
}

// The slower of the two is the last one in most steps, and alone would save next to nothing.
TEST(Diagnosis, SeveralRanksComputeLongerAlsoIfOneIsLast) {
  const Diagnosis diagnosis =
      diagnosis_of({.ranks = 4, .computing = [](int rank, int step) {
                      return of_two_slow_ranks(rank, step, rank == 3 ? 13500 : 13000);
                    }});
  EXPECT_EQ(diagnosis.finding, Finding::slow_ranks);
}

// One light share, and a share that grows from rank to rank, are batches of unequal cost.
TEST(Diagnosis, MostRanksAreNotSlow) {
  const auto diagnosis_with = [](int ranks, const std::vector<double>& computing) {
    return diagnosis_of({.ranks = ranks, .computing = [=](int rank, int step) {
                           return computing[static_cast<std::size_t>(rank)] +
                                  ((rank + step) % 2 == 0 ? 120.0 : 0.0);
                         }});
  };
  EXPECT_EQ(diagnosis_with(4, {5000, 10000, 10000, 10000}).finding, Finding::uneven_load);
  EXPECT_NE(diagnosis_with(6, {10e3, 11e3, 12e3, 13e3, 14e3, 15e3}).finding, Finding::slow_ranks);
}

TEST(Diagnosis, NamesSomeOfManySlowRanks) {
  const Diagnosis diagnosis =
      diagnosis_of({.ranks = 20, .computing = [](int rank, int step) {
                      return of_two_slow_ranks(rank < 10 ? 0 : rank, step, 14000.0);
                    }});
  EXPECT_EQ(diagnosis.finding, Finding::slow_ranks);
  EXPECT_THAT(diagnosis.sentence,
              HasSubstr("Ranks 10, 11, 12, 13, 14, 15, 16, 17, ... (10 of 20) hold this run back"));
}

TEST(Diagnosis, TimeBetweenStepsOnACoreIsNotForDataLoaders) {
  auto traces = make_timelines({.between = [](int, int) { return 6000.0; }, .queued = never});
  const auto first_remedy = [&] { return texts_of(diagnose(analyse(merge(traces))))[0]; };
  EXPECT_THAT(first_remedy(), HasSubstr("data loader"));
  for (RankTrace& trace : traces) {
    for (std::size_t i = 0; i < trace.thread.size(); ++i) trace.thread[i].cpu += i / 2 * 6000;
  }
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::between_steps);
  EXPECT_THAT(first_remedy(), HasSubstr("optimizer.step()"));
}

}  // namespace
}  // namespace paceline::report
