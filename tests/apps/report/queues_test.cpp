#include <gmock/gmock.h>

#include <algorithm>
#include <string>

#include "apps/report/diagnosis_of.h"
#include "report/analysis/replay.h"
#include "support/made_timelines.h"

namespace paceline::report {
namespace {

using test::MadeJob;
using test::make_timelines;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

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
  for (const Remedy& remedy : diagnose(a).remedies) EXPECT_FALSE(remedy.prediction.has_value());
  // Of four ranks, three of which are here; rank 1 is slow and does not queue.
  MadeJob job{.ranks = 4,
              .computing = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; },
              .queued = [](int rank, int) { return rank == 1 ? 0.0 : 2000.0; }};
  traces = make_timelines(job);
  traces.pop_back();
  EXPECT_EQ(diagnose(analyse(merge(traces))).finding, Finding::straggler);
  EXPECT_EQ(diagnose(analyse(merge(traces))).rank, 1);
}

// Rank 0 queues for 0.5 of the 1 ms in which it could run, and sleeps for 8 ms of 9.
TEST(Diagnosis, WithoutATimelineQueuesArePartsOfAllTime) {
  auto traces = make_timelines({.computing = [](int rank, int) { return rank == 1 ? 9e3 : 1e3; },
                                .queued = [](int rank, int) { return rank == 0 ? 500.0 : 0.0; }});
  traces.pop_back();
  const Diagnosis diagnosis = diagnose(analyse(merge(traces)));
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.rank, 1);
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

}  // namespace
}  // namespace paceline::report
